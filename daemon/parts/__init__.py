"""The parts of a service in four groups: the store, the models, the sessions, and the upkeep.

Each group is made of those before it, and closes its own parts; so they close in the other direction. Handlers ask a
group, or a part of a group, and reach into no part.
"""
