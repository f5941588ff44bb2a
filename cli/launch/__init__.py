"""`torpor launch`: a coding agent on this daemon, started in one word.

`agents.py` is the table of the agents: data alone. `filling.py` makes environment, arguments and files of a record and
the daemon's facts. `user_settings.py` merges an agent's settings into the user's own file, where that is asked for.
"""
