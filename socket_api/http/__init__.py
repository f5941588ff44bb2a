"""The daemon over HTTP, for clients that speak OpenAI's or Anthropic's API. Server half. `torpor serve` imports it only
for `--http-socket` or `--http`.
"""
