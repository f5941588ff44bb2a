"""Resident models: loaded by mlx-lm, identified by us, with the facts that sessions need. A model is the bundled demo
model, a folder, or a name on a hub (`hub.py`). Code that ships with a model is never run (threat 57).
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import mlx.core as mx
import mlx_lm
from mlx.utils import tree_flatten
from mlx_lm.models.cache import make_prompt_cache

from ...memvid.format.identity import Identity
from ...places import expanded
from ...snapshot import adapter_files
from ...snapshot.adapter_files import identify_adapter, load_settings
from ...snapshot.caches import arrays_of, make_room
from ...snapshot.checkpoints import Checkpoints
from ...snapshot.digests import DigestCache
from ...snapshot.errors import ModelFilesChanging
from ...snapshot.forking import fork
from ...snapshot.kind import copied
from ...snapshot.kinds import holds_shared, quantized
from ...snapshot.layout import DEFAULT_KV_GROUP, KV_BITS, KV_GROUPS, CacheLayout, KvChoice, kv_format_of, layout_of
from ...snapshot.model_files import NO_ADAPTER, files_of, identify, lacks, require_few_layers, require_model_files
from ...snapshot.passes import SEGMENTED
from ...snapshot.state import LiveState, token_array
from ...snapshot.tensor_list import NotWhole, tensor_bytes
from ..errors import InvalidConfiguration, ModelUnavailable
from . import backend, hub
from .adapters import AdapterChoice, attach, folder_of
from .attention import run_round
from .chat_template import Render, renderer, rules_of
from .company import Company
from .control_tokens import settle_control_tokens
from .grammars import Grammars
from .loaded_files import LoadedFiles, stamps_of
from .marks import Marks
from .sharing import Sharing

__all__ = ("DEFAULT_KV_GROUP", "KV_BITS", "KV_GROUPS", "KvChoice", "LoadedModel", "load_model")

DEMO_MODEL_NAME = "demo"
DEMO_MODEL_FOLDER = Path(__file__).parent.parent / "demo_model"
# The keys of a configuration for the longest sequence of the model.
_CONTEXT_KEYS = ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length", "n_ctx")
# For a configuration without one: a session must not grow without bound.
DEFAULT_CONTEXT_TOKENS = 8192
# The tokenizer would warn of longer texts; we refuse them, with both sizes.
_TOKENIZER_SETTINGS = {"model_max_length": 10**9}
_HALF = (mx.float16, mx.bfloat16)
# Half-precision types by their names in files.
_HALF_IN_FILES = frozenset({"F16", "BF16"})

PIECE_BYTES: Final = 256 * 1024 * 1024
"""Weights that are evaluated at once. Widened weights are in memory twice until their piece is done, and a caller that
gives MLX's buffers back meanwhile waits for one piece."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to compute.

    parameters: number of weights; weights_bytes: the memory they take; context_tokens: the longest ledger; end_tokens:
    ids that end a generation; control_texts: the names of control tokens; backend: the parts of
    the identity that may differ; files: those that it was loaded from; grammars: what answers can be held to. sharing:
    what its branches share. company: what its sessions get beside each other.
    """

    name: str
    folder: Path
    network: Any
    tokenizer: Any
    identity: Identity
    backend: Mapping[str, str]
    layout: CacheLayout
    compute_dtype: str
    parameters: int
    weights_bytes: int
    context_tokens: int
    end_tokens: frozenset[int]
    control_texts: frozenset[str]
    render: Render
    marks: Marks
    files: LoadedFiles
    grammars: Grammars
    kv: KvChoice | None = None
    sharing: Sharing = field(default_factory=Sharing, compare=False)
    company: Company = field(default_factory=Company, compare=False)

    def without_weights(self) -> LoadedModel:
        """The facts of the model for after its unload: it computes nothing, and has no tokenizer."""
        nothing = Grammars(None, 0, ())
        return replace(self, network=None, tokenizer=None, render=_render_nothing, grammars=nothing)

    @property
    def is_loaded(self) -> bool:
        """Whether the weights are in memory."""
        return self.network is not None

    def new_caches(self) -> list[Any]:
        """Empty caches, one for each layer."""
        return _new_caches(self.network, self.kv)

    def new_state(self, random_key: mx.array) -> LiveState:
        """The state of a session that has read nothing."""
        checkpoints = Checkpoints(record_bytes=self.layout.record_bytes)
        return LiveState(token_array(), self.new_caches(), None, random_key, checkpoints=checkpoints)

    def branch_caches(self) -> list[Any]:
        """Empty caches for a fork of a state: they share memory with it where they can (`models/sharing.py`)."""
        self.sharing.settle(self.network, self.new_caches, self.layout.vocabulary, self.compute_dtype)
        return self.sharing.shared(self.new_caches())

    def settle_form(self, state: LiveState) -> None:
        """Give the state the caches that its history asks for: a session of which a token was read as a branch reads it
        goes on so, and any other does not. For a state that becomes a session, or whose tokens come from elsewhere."""
        if state.passes.is_segmented:
            self.begin_branch(state)
        elif holds_shared(state.caches):
            state.caches = fork(state, self.new_caches()).caches

    def begin_branch(self, state: LiveState) -> None:
        """Give the state the caches of a branch, if the model has such."""
        if not holds_shared(state.caches) and holds_shared(caches := self.branch_caches()):
            state.caches = fork(state, caches).caches

    def extend(self, tokens: Sequence[int], state: LiveState) -> mx.array:
        """Read tokens into the state's caches; the unevaluated logits `[1, len(tokens), vocabulary]`.

        A state's caches grow only here and in rounds, so computed tokens and passes are counted here.
        """
        if state.passes.is_segmented:
            self.begin_branch(state)
        state.computed_tokens += len(tokens)
        state.passes.add(SEGMENTED if len(tokens) == 1 and self._takes_segments(state.caches) else len(tokens))
        return self.run(tokens, state.caches)

    def run(self, tokens: Sequence[int], caches: list[Any]) -> mx.array:
        """One model call: unevaluated logits `[1, len(tokens), vocabulary]`. Counts nothing; its caller puts the caches
        back."""
        if len(tokens) > 1:  # one token fits, or the cache grows by itself
            make_room(caches, len(tokens))
        elif self.sharing.in_rounds and holds_shared(caches):
            return copied(self.run_round(tokens, [caches]))[None]  # without the rows that compute for nothing
        logits: mx.array = self.network(mx.array(list(tokens))[None], cache=caches)
        return logits

    def run_batch(self, tokens: Sequence[int], batch: list[Any]) -> mx.array:
        """One model call that reads one token for each row of a batch: unevaluated logits `[rows, vocabulary]`."""
        logits: mx.array = self.network(mx.array(list(tokens))[:, None], cache=batch)[:, -1].astype(mx.float32)
        return logits

    @property
    def can_read_in_rounds(self) -> bool:
        """Whether `run_round` takes sessions."""
        self.company.settle(self.network, self.new_caches, self.layout.vocabulary, self.compute_dtype)
        return self.company.in_rounds

    def run_round(self, tokens: Sequence[int], states: Sequence[list[Any]], rows: int | None = None) -> mx.array:
        """One model call that reads one token for each session, or each branch: unevaluated logits `[states,
        vocabulary]`. states: the caches of each. rows: of the call; None for the least for branches."""
        return run_round(self.network, tokens, states, rows or self.sharing.least_rows)

    def _takes_segments(self, caches: Sequence[Any]) -> bool:
        return self.sharing.takes_segments and holds_shared(caches)

    def encode(self, text: str, *, opening: bool) -> list[int]:
        """Tokens of a text that may have control tokens written out, as a template's text.

        opening: whether it begins a ledger; a tokenizer may put a first token there, if the text does not have it.
        """
        first = getattr(self.tokenizer, "bos_token", None)
        adds = opening and not (first and text.startswith(first))
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=adds)
        return ids

    def encode_plain(self, text: str, *, opening: bool) -> list[int]:
        """Tokens of plain text: control tokens in it are text like any other, so that a document or a message cannot
        end a turn or speak for the system."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=opening, split_special_tokens=True)
        return ids

    def holds_control(self, text: str) -> bool:
        """Whether the text has the name of a control token in it."""
        return any(token in text for token in self.control_texts)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones left out."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


def load_model(
    name: str, source: str, digests: DigestCache, adapter: AdapterChoice | None = None, kv: KvChoice | None = None
) -> LoadedModel:
    """Load a model, evaluate every weight, and compute its identity. On any thread that ends with `mx.clear_streams()`:
    all is evaluated, so that another thread may compute with it.

    source: a folder, or a name on the hub. adapter: loaded on top of it. kv: how to quantize keys and values as they
    are computed; None keeps them in the computing type.

    Raises:
        ModelUnavailable: there is no such model, mlx-lm cannot load it, or it cannot keep its KV quantized so.
        ModelFilesMissing: the folder has not all that a model needs.
        ModelFilesChanging: the files were written to while they were being loaded.
        AdapterUnavailable, AdapterFilesMissing, AdapterMismatch: the adapter is missing, not whole, or of another
            model.
        UnsupportedCache: it keeps its context in a kind of cache that cannot be slept.
        InvalidConfiguration: there is no folder for temporary files, which MLX needs.
    """
    _require_temporary_folder()
    folder = _folder_of(source)
    adapter_folder = folder_of(adapter, name) if adapter else None
    folders = [folder, adapter_folder] if adapter_folder else [folder]
    before = [stamps_of(each) for each in folders]
    require_model_files(folder)
    require_few_layers(folder)
    network, tokenizer, config = _load(name, source, folder)
    adapter_part = NO_ADAPTER
    if adapter and adapter_folder:
        settings = attach(network, adapter_folder, model=name, fused=adapter.fused)
        adapter_part = identify_adapter(settings, adapter_folder, fused=adapter.fused, digests=digests)
    compute_dtype = _settle_dtype(network)
    # All of it, now: a lazily loaded weight would be read from a file that may change under the daemon (threat 53).
    _evaluate(network)
    layout = _probe_layout(network, name, kv)
    identity = identify(
        folder,
        chat_template=_template_of(tokenizer),
        compute_dtype=compute_dtype,
        kv_format=kv_format_of(layout),
        cache_layout=str(layout),
        adapter=adapter_part,
        digests=digests,
    )
    files = LoadedFiles.of(folder, adapter_folder, digests)
    for each, stamps in zip(folders, before, strict=True):
        if stamps_of(each) != stamps:
            raise ModelFilesChanging(
                f"The files in {each} changed while {name!r} was being loaded. Start again when they are complete.",
                path=str(each),
            )
    weights = [weight for _, weight in tree_flatten(network.parameters())]
    end_tokens = frozenset(int(token) for token in tokenizer.eos_token_ids)
    controls, rules = settle_control_tokens(tokenizer), rules_of(tokenizer)
    return LoadedModel(
        name=name,
        folder=folder,
        network=network,
        tokenizer=tokenizer,
        identity=identity,
        backend=backend.describe(adapter_folder),
        layout=layout,
        compute_dtype=compute_dtype,
        parameters=sum(int(weight.size) for weight in weights),
        weights_bytes=sum(int(weight.nbytes) for weight in weights),
        context_tokens=_context_tokens(config),
        end_tokens=end_tokens,
        control_texts=frozenset(controls.names.values()),
        render=renderer(tokenizer, rules),
        marks=Marks.of(tokenizer, controls, knows_tools=rules.tools),
        files=files,
        grammars=Grammars(tokenizer, layout.vocabulary, end_tokens),
        kv=kv,
    )


@dataclass(frozen=True, slots=True)
class Prospect:
    """What a model that is not loaded would take. context_tokens: its longest ledger; layout: of its caches."""

    weights_bytes: int
    context_tokens: int
    layout: CacheLayout


def foresee(folder: Path) -> Prospect:
    """Look ahead at a model. It is built, and reads one token, but nothing of it is evaluated: so arrays have their
    shapes and no memory, and no weights are read. Raises as `load_model`."""
    require_model_files(folder)
    require_few_layers(folder)
    try:
        network, config = mlx_lm.utils.load_model(folder, lazy=True, trust_remote_code=False)
        _settle_dtype(network)
        caches = _new_caches(network, None)
        vocabulary = int(network(mx.array([[0]]), cache=caches).shape[-1])
    except Exception as error:  # as of `_load`
        raise ModelUnavailable(f"The model in {folder} cannot be built: {_first_line(error)}.") from error
    layout = layout_of(caches, vocabulary)
    return Prospect(estimate_bytes(folder.name, str(folder)), _context_tokens(config), layout)


def look_at(name: str, source: str, adapter: AdapterChoice | None) -> None:
    """Check the folders of a model and its adapter without loading them. A model on the hub is not checked. Raises
    ModelUnavailable, ModelFilesMissing, AdapterUnavailable, AdapterFilesMissing."""
    if _is_of_this_machine(source):
        require_model_files(_folder_of(source))
    if adapter is not None:
        load_settings(folder_of(adapter, name))


def estimate_bytes(
    name: str, source: str, adapter: AdapterChoice | None = None, on_bytes: hub.OnBytes = hub.untold
) -> int:
    """The memory that a model's weights will take, in bytes, by its files; it is downloaded if needed, as `hub.fetch`
    does. Raises ModelUnavailable, ModelFilesMissing, AdapterUnavailable, AdapterFilesMissing."""
    folder = _folder_of(source, on_bytes)
    require_model_files(folder)
    files, _ = files_of(folder)
    if adapter is not None:
        adapter_folder = folder_of(adapter, name)
        load_settings(adapter_folder)
        files.append(adapter_folder / adapter_files.WEIGHTS_FILE)
    sizes: dict[str, int] = {}
    for file in files:
        try:
            of_file = tensor_bytes(file)
        except (NotWhole, OSError) as error:
            raise ModelUnavailable(f"{file} cannot be read: {error}.", model=name, path=str(file)) from error
        for kind, size in of_file.items():
            sizes[kind] = sizes.get(kind, 0) + size
    half = sum(size for kind, size in sizes.items() if kind in _HALF_IN_FILES)
    return sum(sizes.values()) + (half if _widens() else 0)


def _evaluate(network: Any) -> None:
    """Evaluate every array of a network, parameters and others, piece by piece. And the random key of this thread: each
    layer draws its first weights with it, and unevaluated it would keep all of those in memory.
    """
    mx.eval(mx.random.state)
    piece: list[mx.array] = []
    for array in _arrays_in(network):
        piece.append(array)
        if sum(each.nbytes for each in piece) >= PIECE_BYTES:
            mx.eval(piece)
            piece = []
    mx.eval(piece)


def _arrays_in(network: Any) -> Iterator[mx.array]:
    """All arrays of a network; `parameters` leaves out names that begin with an underscore."""
    for _, leaf in tree_flatten(network):
        if isinstance(leaf, mx.array):
            yield leaf
        elif hasattr(leaf, "__dict__") and not isinstance(leaf, type):
            yield from (value for value in vars(leaf).values() if isinstance(value, mx.array))


def _widens() -> bool:
    """Whether half-precision weights are computed in float32 here."""
    return bool(mx.default_device() == mx.Device(mx.cpu))


def _render_nothing(messages: object, open_turn: bool, root: object = None) -> str:
    raise AssertionError("a model that is not loaded renders nothing")


def _is_of_this_machine(source: str) -> bool:
    """Whether a source is, or looks like, a path."""
    path = expanded(source)
    return not source or path.exists() or source.startswith((".", "/", "~")) or source.count("/") != 1


def _folder_of(source: str, on_bytes: hub.OnBytes = hub.untold) -> Path:
    path = expanded(source)
    _require_no_gguf(path, source)
    if source and path.is_dir():
        return path.resolve()
    if source and path.exists():
        raise ModelUnavailable(
            f"{source!r} is a file, and a model is a folder. Give the folder that it lies in, if it is of a model.",
            source=source,
        )
    if _is_of_this_machine(source):
        raise ModelUnavailable(
            f"There is no model folder {source!r}. Give an existing folder, or a hub name such as OWNER/NAME.",
            source=source,
        )
    return hub.cached(source) or hub.fetch(source, on_bytes)


def _require_temporary_folder() -> None:
    """Refuse a missing folder for temporary files. MLX looks at these variables in this order, and its own error does
    not name them."""
    variable = next((name for name in ("TMPDIR", "TMP", "TEMP", "TEMPDIR") if os.environ.get(name)), None)
    if variable is not None and not Path(os.environ[variable]).is_dir():
        raise InvalidConfiguration(
            f"${variable} names {os.environ[variable]!r} for temporary files, and no such folder is there. Make it, or "
            f"name another or none, and start the daemon again.",
            path=os.environ[variable],
        )


def _require_no_gguf(path: Path, source: str) -> None:
    is_one = path.suffix.lower() == ".gguf" and path.is_file()
    if is_one or (source and any(path.glob("*.gguf")) and not any(path.glob("*.safetensors"))):
        raise ModelUnavailable(
            f"{source!r} is a model in GGUF form, which MLX-LM does not read. Name the same model in MLX or Hugging "
            "Face form: a folder with config.json, a tokenizer and .safetensors files, or a hub name (OWNER/NAME).",
            source=source,
        )


def _load(name: str, source: str, folder: Path) -> tuple[Any, Any, dict[str, Any]]:
    try:
        network, tokenizer, config = mlx_lm.load(
            str(folder), tokenizer_config=_TOKENIZER_SETTINGS, lazy=True, return_config=True, trust_remote_code=False
        )
    except Exception as error:  # mlx-lm and its tokenizer raise any error for a malformed folder
        missing = lacks(folder)
        why = _first_line(error) if missing is None else f"{folder} lacks {missing}"
        raise ModelUnavailable(
            f"Model {name!r} cannot be loaded from {source!r}: {why}.", model=name, source=source
        ) from error
    return network, tokenizer, config


def _settle_dtype(network: Any) -> str:
    """Compute half-precision weights in float32 on a CPU: MLX's half-precision products there run at 1 to 3 GFLOP/s,
    float32 ones at a hundred. Gives the name of the type, a part of the identity."""
    dtypes = {
        weight.dtype for _, weight in tree_flatten(network.parameters()) if mx.issubdtype(weight.dtype, mx.floating)
    }
    if _widens() and dtypes & set(_HALF):
        network.set_dtype(mx.float32)
        return "float32"
    return "+".join(sorted(str(dtype).removeprefix("mlx.core.") for dtype in dtypes))


def _template_of(tokenizer: Any) -> object:
    """The chat template: a text that comes with the model, or code of mlx-lm."""
    text = getattr(tokenizer, "chat_template", None)
    code = getattr(tokenizer, "_chat_template", None)
    module = inspect.getmodule(code) if code is not None else None
    return text if module is None else {"text": text, "code": inspect.getsource(module)}


def _new_caches(network: Any, kv: KvChoice | None) -> list[Any]:
    caches: list[Any] = make_prompt_cache(network)
    if kv is None:
        return caches
    return [quantized(cache, bits=kv.bits, group_size=kv.group_size) for cache in caches]


def _probe_layout(network: Any, name: str, kv: KvChoice | None) -> CacheLayout:
    """Read one token, and take the layout from the caches; this also warms the model up."""
    caches = _new_caches(network, kv)
    try:
        logits = network(mx.array([[0]]), cache=caches)
        mx.eval(logits, arrays_of(caches))
    except Exception as error:  # a model's code may raise any error for an unexpected cache
        if kv is None:
            raise
        raise ModelUnavailable(
            f"Model {name!r} cannot keep its KV in {kv.bits} bits in groups of {kv.group_size}: "
            f"{_why_not_in_groups(network, kv.group_size) or _first_line(error)}, or serve it without --kv-bits.",
            model=name,
            bits=kv.bits,
            group_size=kv.group_size,
        ) from error
    return layout_of(caches, int(logits.shape[-1]))


def _why_not_in_groups(network: Any, group_size: int) -> str | None:
    """The sizes of heads that groups of this size do not divide, and sizes that do; None if they divide all."""
    caches = make_prompt_cache(network)
    mx.eval(network(mx.array([[0]]), cache=caches))
    chosen = [one for one in caches if quantized(one, bits=KV_BITS[0], group_size=group_size) is not one]
    sizes = sorted({array.shape[-1] for array in arrays_of(chosen)})
    if all(size % group_size == 0 for size in sizes):
        return None
    fitting = [str(each) for each in KV_GROUPS if all(size % each == 0 for size in sizes)]
    way = f"choose groups of {' or '.join(fitting)}" if fitting else "no group does"
    return f"they do not divide its heads, which hold {' and '.join(map(str, sizes))} numbers; {way}"


def _context_tokens(config: dict[str, Any]) -> int:
    for settings in (config, config.get("text_config") or {}):
        for key in _CONTEXT_KEYS:
            value = settings.get(key)
            if isinstance(value, int) and value > 0:
                return value
    return DEFAULT_CONTEXT_TOKENS


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
