"""Sessions as tools of MCP: verbs, offered to an agent. Wire half. Needs the extra `mcp`, whose import takes a second:
only `torpor mcp` and the first request to `/mcp` import this.
"""
