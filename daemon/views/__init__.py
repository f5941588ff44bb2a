"""Views: what a store's files tell, as records that commands, HTTP and the page render alike.

Each view is a record of `daemon/api`, made by one function of an open store. The daemon answers with what that function
gives, and adds what it alone knows; a command that finds no daemon calls it itself. Knows neither MLX nor pydantic, for
which a command that reads files should not wait.
"""
