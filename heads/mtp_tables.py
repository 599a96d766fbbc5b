"""What engines load of the MTP modules that checkpoints ship themselves: in the checkpoint, or alone, beside it.

D target width.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwright.configs import UserError
from headwright.data.target import TargetSpec
from headwright.heads.base import Adopted, Export
from headwright.heads.contract import Contract, Key, Method, Shapes, always
from headwright.heads.directory import Config, Entry, read_json
from headwright.heads.engine_tables import SGLANG, VERSIONS, VLLM, Arguments, vllm_line
from headwright.heads.mtp_native import FAMILIES, Family, NativeReader, native_tensors

if TYPE_CHECKING:
    from headwright.heads.mtp import Head

FAMILY, ALONE = "mtp_family", "headwright_mtp"  # what is inferred, and what our overlays say
COUNTS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers")


def family_in(config: Config, names: Iterable[str]) -> str | None:
    """The family whose projection is there under its number."""
    there, layers = set(names), layers_of(config)
    return next((name for name, family in FAMILIES.items() if family.place(family.eh_proj, 0, layers) in there), None)


def layers_of(config: Config) -> int:
    """The target's layers, after which modules are counted."""
    text = config.get("text_config") or config
    return int((config.get(ALONE) or {}).get("layers") or text.get("num_hidden_layers") or 0)


def knows(config: Config, names: Iterable[str]) -> bool:
    """A whole checkpoint with such modules, or an overlay of ours."""
    there = list(names)
    whole = ALONE in config or any(name.startswith("model.layers.0.") for name in there)
    return whole and family_in(config, there) is not None


def infer(config: Config, entries: Mapping[str, Entry]) -> Config:
    """The family, by the names that are there."""
    return config | {FAMILY: family_in(config, entries)}


def shapes_of(config: Config) -> Shapes:
    """The parts around every module's layer. The layer itself is of the target's kind, which this does not know."""
    family, text = FAMILIES[config[FAMILY]], config.get("text_config") or config
    D, layers = text["hidden_size"], layers_of(config)
    shapes: Shapes = {}
    for module in range(count_of(config) if family.numbered else 1):
        for name, shape in parts(family, D).items():
            shapes[family.place(name, module, layers)] = shape
    return shapes


def parts(family: Family, width: int) -> Shapes:
    """Norms and projection."""
    found: Shapes = {family.enorm: (width,), family.hnorm: (width,), family.eh_proj: (width, 2 * width)}
    return found if family.norm is None else found | {family.norm: (width,)}


def count_of(config: Config) -> int:
    """Modules, by whichever key says it."""
    text = config.get("text_config") or config
    return next((int(text[key]) for key in COUNTS if text.get(key)), 1)


def uncounted(config: Config, spec: TargetSpec | None) -> str | None:
    """A key that tells engines of the modules."""
    text = config.get("text_config") or config
    if config.get(FAMILY) == "qwen":  # one is assumed
        return None
    return None if any(text.get(key) for key in COUNTS) else f"is missing (or {', '.join(COUNTS[1:])})"


RULES = (Key(COUNTS[0], uncounted, "the engine finds no MTP module", "write how many there are"),)


def arguments(config: Config, target: str, folder: Path, count: int) -> dict[str, Any]:
    """The checkpoint is the target; modules alone go beside it. Beyond their number drafts must be a multiple of it."""
    modules = count_of(config)
    speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": max(count // modules, 1) * modules}
    if ALONE not in config:
        return {"model": str(folder), "speculative_config": speculative}
    return {"model": target, "speculative_config": speculative | {"model": str(folder)}}


VLLM_ARGUMENTS: Arguments = arguments


def launch_sglang(config: Config, target: str, folder: Path, count: int) -> str:
    """A whole checkpoint by itself, modules alone beside the target."""
    beside = f"  --speculative-draft-model-path {folder} \\\n" if ALONE in config else ""
    return (
        f"python -m sglang.launch_server --model-path {target if beside else folder} --dtype {config.get('dtype', 'auto')} "
        f"--speculative-algorithm NEXTN \\\n{beside}  --speculative-num-steps {count} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {count + 1}"
    )


def table(engine: str, keys: tuple[Key, ...], launch: Any, missing: str, **more: Any) -> Contract:
    """Of one engine. Anything else in the files is the target's."""
    return Contract(
        method="mtp-native",
        engine=engine,
        version=VERSIONS[engine],
        shapes=shapes_of,
        launch=launch,
        missing=always(missing),
        extra=always(""),
        closed=False,
        proven=False,
        keys=keys,
        **more,
    )


CONTRACTS = (
    table(
        VLLM,
        RULES,
        vllm_line(VLLM_ARGUMENTS),
        "vLLM stops, or serves uninitialised memory there without a word",
        arguments=VLLM_ARGUMENTS,
    ),
    table(SGLANG, RULES, launch_sglang, "SGLang will serve random memory there without a word: accept len 1.00"),
)


ENGINES = ("native", "stitched")


def export_native(head: "Head", engine: str) -> Export:
    """native: the checkpoint's MTP tensors alone, trained. stitched: a copy of the whole checkpoint with them in place."""
    if engine not in ENGINES or not head.config.native:
        raise UserError(
            f"export.engines {engine!r}: MTP heads export as: mimo, ernie; those that began as a checkpoint's own (head.start "
            "native) as: native, stitched"
        )
    tensors, source = native_tensors(head), Path(head.config.native["checkpoint"])
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    config = read_json(source / "config.json") | {ALONE: dict(head.config.native), COUNTS[0]: len(head.links)}
    return Export(
        tensors,
        config,
        shapes,
        lambda folder: NativeReader(head, folder),
        CONTRACTS,
        into=source if engine == "stitched" else None,
        shares=False,
    )


def no_reader(*given: Any) -> Any:
    """The target's kind of layer is needed to run such modules."""
    raise UserError("a checkpoint's own MTP modules are run with their target: target.model, head.start=native")


def adopt(config: Config, tensors: Any, spec: TargetSpec, shared: Any) -> Adopted:
    """They become a head of ours where a run starts from them."""
    raise UserError("a checkpoint's own MTP modules: give it as target.model, and set head.kind=mtp head.start=native")


METHODS = (
    Method(
        "mtp-native", "mtp", CONTRACTS, knows, lambda config: config, lambda name: name, no_reader, adopt, infer=infer
    ),
)
