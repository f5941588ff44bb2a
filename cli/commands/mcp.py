"""`torpor mcp`: sessions as tools for a program that speaks MCP."""

from __future__ import annotations

from ...socket_api.errors import ExtraMissing
from ..reach.options import NamespaceChoice, SocketOption


def mcp(socket: SocketOption = None, namespace: NamespaceChoice = None) -> None:
    """The program starts this command and talks with it on its standard streams. Its tools list, show, chat with, put
    to sleep, wake and fork the sessions of a running daemon. It needs an extra: pip install 'torpor\\[mcp]'. With
    [cyan]torpor serve --http[/] the same tools are at /mcp.

    [bold]Examples[/]

    [cyan]torpor mcp --namespace team[/]
    [cyan]claude mcp add torpor -- torpor mcp[/]
    """
    try:
        from ...socket_api.mcp.stdio import serve
    except ModuleNotFoundError as error:
        raise ExtraMissing(
            f"torpor mcp needs the package {error.name}, which is not installed: pip install 'torpor[mcp]'.",
            extra="mcp",
        ) from error
    serve(socket, namespace)
