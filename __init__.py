"""Torpor: local language-model agents with a memory that survives sleep, crash and reboot."""

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from .socket_api import AsyncClient, Client

__all__ = ["AsyncClient", "Client", "__version__"]

if not TYPE_CHECKING:  # else a type checker would accept any name

    def __getattr__(name: str) -> Any:
        # At its first use: most that imports this package needs no client.
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from . import socket_api

        return getattr(socket_api, name)
