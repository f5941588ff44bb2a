"""The configuration file of a daemon: what may stand in it, and how it is read. TOML; whatever is not known is refused.

memory_budget = "12GiB"
idle_sleep = "15min"
on_model_change = "reload"

[models.qwen]
path = "~/models/Qwen3-0.6B"
pin = true
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Final, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from ...memvid.units import parse_bytes, parse_seconds
from ..engine.admission import MOST_WAITING_EVER
from ..errors import InvalidConfiguration

MAX_CONFIG_BYTES: Final = 256 * 1024
"""Room for a thousand models. A longer file is refused before it is read."""

LoadPolicy = Literal["first", "start", "use"]


def _size(value: object) -> object:
    size = parse_bytes(value) if isinstance(value, str) else value
    if isinstance(size, int) and size < 0:
        raise ValueError("a size is not below 0")
    return size


def _budget(value: object) -> object:
    size = _size(value)
    if size == 0:
        raise ValueError("0 would hold nothing; leave it out for no bound")
    return size


def _seconds(value: object) -> object:
    if isinstance(value, bool) or not isinstance(value, str | int | float):
        return value
    seconds = parse_seconds(value) if isinstance(value, str) else float(value)
    if not 0 < seconds < math.inf:
        raise ValueError("a duration is above 0")
    return seconds


Size = Annotated[int, BeforeValidator(_size)]
Budget = Annotated[int, BeforeValidator(_budget)]
Duration = Annotated[float, BeforeValidator(_seconds)]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


class ModelTable(_Table):
    """`[models.NAME]`: how a model is served. load: when, if not as the file's `load` has it."""

    path: Annotated[str, Field(min_length=1)]
    adapter: Annotated[str, Field(min_length=1)] | None = None
    fuse: bool = False
    kv_bits: Literal[8, 4] | None = None
    kv_group: Literal[32, 64, 128] = 64
    load: Literal["start", "use"] | None = None
    pin: bool = False
    ttl: Duration | None = None

    @model_validator(mode="after")
    def _require_an_adapter_to_fuse(self) -> ModelTable:
        if self.fuse and self.adapter is None:
            raise ValueError("fuse is for an adapter, and there is none")
        return self


class Configuration(_Table):
    """The whole file. Each option of the command line that is given holds over what stands here."""

    load: LoadPolicy | None = None
    memory_budget: Budget | None = None
    idle_sleep: Duration | None = None
    stop_within: Duration | None = None
    model_ttl: Duration | None = None
    on_model_change: Literal["refuse", "reload"] | None = None
    max_waiting: Annotated[int, Field(ge=1, le=MOST_WAITING_EVER)] | None = None
    store_budget: Budget | None = None
    daily_write_budget: Budget | None = None
    keep_free: Size | None = None
    models: dict[Name, ModelTable] = Field(default_factory=dict)


def read_configuration(path: Path) -> Configuration:
    """Read a configuration; folders in it are meant from where the file lies.

    Raises:
        InvalidConfiguration: it is not there, too long, not TOML, or says what is not known. The field is named.
    """
    try:
        with path.open("rb") as file:
            raw = file.read(MAX_CONFIG_BYTES + 1)
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror or error}") from error
    if len(raw) > MAX_CONFIG_BYTES:
        raise _invalid(path, f"is longer than {MAX_CONFIG_BYTES // 1024} KiB")
    try:
        found = Configuration.model_validate(tomllib.loads(raw.decode()))
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the file"
        problem = _problem(first["msg"], first["loc"], is_unknown=first["type"] == "extra_forbidden")
        raise _invalid(path, f"is wrong at {field}: {problem}", field=field) from None
    except (ValueError, RecursionError) as error:  # of TOML, of UTF-8
        raise _invalid(path, f"is not TOML: {error}") from error
    beside = _beside(path.absolute().parent)
    models = {
        name: table.model_copy(update={"path": beside(table.path), "adapter": table.adapter and beside(table.adapter)})
        for name, table in found.models.items()
    }
    return found.model_copy(update={"models": models})


def _problem(said: str, location: tuple[int | str, ...], *, is_unknown: bool) -> str:
    """What is wrong at a key; of one that is not known, the closest one and all that there are."""
    if not is_unknown:
        return said.removeprefix("Value error, ").replace("Input should be", "it must be").rstrip(".")
    known = sorted((ModelTable if len(location) > 1 else Configuration).model_fields)
    close = get_close_matches(str(location[-1]), known, n=1)
    meant = f"; {close[0]} is, if that was meant" if close else ""
    return f"this key is not known{meant}. The keys here are {', '.join(known)}"


def _beside(folder: Path) -> Callable[[str], str]:
    def absolute(source: str) -> str:
        path = Path(source).expanduser()
        if path.is_absolute():
            return str(path)
        is_of_hub = source.count("/") == 1 and not source.startswith(".") and not (folder / path).exists()
        return source if is_of_hub else str(folder / path)

    return absolute


def _invalid(path: Path, why: str, **details: object) -> InvalidConfiguration:
    return InvalidConfiguration(f"The configuration {path} {why}.", path=str(path), **details)
