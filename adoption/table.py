"""Which models of other libraries `adopt` fuses, found by adopting tiny random ones: the table of docs/adopted_models.md.

    python -m adoption.table                         # all; pip install transformers timm diffusers
    python -m adoption.table llama timm/vit_tiny_patch16_224     # these alone

Each model computes its output and its gradients before and after, in fp32, and then takes a step in training mode.
"""

import copy
import sys
import tomllib
import traceback
import warnings
from contextlib import suppress
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from adoption.models import default_loss, results_of
from measure.files import replace_text
from ops import Adoption, adopt

MODELS = tomllib.loads(Path(__file__).with_name("models.toml").read_text())
TINY = {field: int(value) for value, fields in MODELS["sizes"].items() for field in fields.split()} | MODELS["others"]

_results = partial(results_of, loss=default_loss)
TABLE = Path(__file__).parents[1] / "docs" / "adopted_models.md"
HEAD = """# What `adopt` fuses, model by model

Written by `python -m adoption.table`, which adopts tiny models with random weights in one call each, without a layout
([adopting](adopt.md)).
"Adds" are norms whose kernel also adds: the residual sum before the norm, or in backward both gradients of the stream.
"Modulated" are norms that are one kernel with the scale and shift of each sample. "Sums" are kinds of residual sums that are
one kernel together with the norm, scale, gate or dropout of their branch. "Rotary": attention modules that turn queries and
keys in one kernel, with or without norms of them before. "MLP": gated MLPs that compute the activation and the product in one
kernel. Parity: the outputs and all gradients in fp32 before and after, and a step in training.

"""


def main(names: list[str]) -> None:
    """names: models of `MODELS`; all if there is none."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    known = dict.fromkeys(MODELS["transformers"].split(), _of_transformers)
    known |= {f"timm/{name}": _of_timm for name in MODELS["timm"].split()}
    known |= {f"diffusers/{name}": _of_diffusers for name in MODELS["diffusers"]}
    missing = [library for library in ("transformers", "timm", "diffusers") if not names and not find_spec(library)]
    if missing:
        raise SystemExit(f"adoption.table: {TABLE.name} has models of {', '.join(missing)}. Install them, or name models.")
    rows = []
    for name in names or known:
        torch.manual_seed(0)
        try:
            model, batch = known.get(name, _of_transformers)(name.rpartition("/")[2])
            expected = _results(_shaken(model), batch)
        except Exception as error:  # a tiny configuration of it needs more care than this script takes
            print(f"{name:40} not tried: {type(error).__name__}: {str(error)[:100]!r}", flush=True)
            continue
        rows.append((name, *_row(model, batch, expected)))
        print("{:40} {:10} {:60} {:30} {:22} {}".format(*rows[-1]), flush=True)
    good = [row for row in rows if row[-1] == "yes"]
    sums = sum(fused[:1].isdigit() for _, _, fused, *_ in good)
    turn, turn_fused, norms = (sum(word in row[3] for row in good) for word in (" of ", "one kernel", "norms"))
    gated, gated_fused = (sum(word in row[4] for row in good) for word in (" of ", "one kernel"))
    words = (
        f"{sums} of {len(rows)} models have fused sums. {turn} turn queries and keys by a function that `adopt` finds: "
        f"{turn_fused} of them in one kernel, {norms} of these with the norms before. {gated} have gated MLPs with names that "
        f"it knows: {gated_fused} of them in one kernel."
    )
    print(f"\n{words}")
    if not names:
        header = ("model", "norms replaced", "one kernel each", "rotary", "MLP", "parity")
        lines = [f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows)]
        replace_text(TABLE, "\n".join([f"{HEAD}{words}\n", *lines, ""]))


def _of_timm(name: str) -> tuple[nn.Module, Any]:
    model = import_module("timm").create_model(name, pretrained=False)
    return model, (torch.randn(2, *model.default_cfg["input_size"]),)


def _of_diffusers(name: str) -> tuple[nn.Module, Any]:
    of: Any = MODELS["diffusers"][name]
    batch = {name: torch.randn(shape) for name, shape in of["floats"].items()} | of.get("others", {})
    batch |= {name: torch.tensor(value) if isinstance(value, list) else value for name, value in of.get("integers", {}).items()}
    return getattr(import_module("diffusers"), name)(**of["config"]), batch


def _of_transformers(name: str) -> tuple[nn.Module, Any]:
    from transformers import CONFIG_MAPPING, AutoModel

    kind = CONFIG_MAPPING[name]
    default = kind()
    fields = {field for field in dir(default) if not isinstance(getattr(kind, field, None), property)}
    fields -= kind.attribute_map.keys() & set(LAYER_KINDS)
    given = {field: value for field, value in TINY.items() if field in fields and _is_like(getattr(default, field), value)}
    for field in set(LAYER_KINDS) & fields:
        if isinstance(kinds := getattr(default, field), list):
            given[field] = (list(dict.fromkeys(kinds)) * 2)[: max(2, len(set(kinds)))]
            given["num_hidden_layers"] = len(given[field])
    config = kind(**(given | MODELS["overrides"].get(name, {})))
    model = AutoModel.from_config(config)
    return model, _batch(model, config)


LAYER_KINDS = ("layer_types", "layers_block_type", "mlp_layer_types", "no_rope_layers")


def _is_like(default: Any, value: Any) -> bool:
    return isinstance(default, type(value) | type(None)) or (isinstance(value, list) and isinstance(default, tuple))


def _batch(model: nn.Module, config: Any) -> dict[str, Tensor]:
    tokens = torch.arange(24).view(2, 12) + 3
    kind: Any = getattr(model, "main_input_name", "input_ids")
    batch: dict[str, Tensor] = {} if kind in ("pixel_values", "input_features", "input_values") else {"input_ids": tokens}
    if kind == "pixel_values":
        size: Any = getattr(config, "image_size", 32)
        batch[kind] = torch.randn(2, getattr(config, "num_channels", 3), *([size] * 2 if isinstance(size, int) else size))
    elif kind == "input_features":
        batch[kind] = torch.randn(2, config.num_mel_bins, 2 * config.max_source_positions)
    elif kind == "input_values":
        spectrum = hasattr(config, "num_mel_bins")
        batch[kind] = torch.randn(2, config.max_length, config.num_mel_bins) if spectrum else torch.randn(2, 800)
    if config.is_encoder_decoder:
        batch["decoder_input_ids"] = tokens
    return batch


def _shaken(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():  # initial scales of 1e-5 and weights of 1 would hide a mistake
            p.add_(0.05 * torch.randn(p.shape, generator=generator))
    return model


def _row(model: nn.Module, batch: Any, expected: dict[str, Tensor]) -> tuple[str, ...]:
    """How many norms are replaced, what is fused, of sums, rotary positions and MLPs, and whether that computes the same."""
    adopted = copy.deepcopy(model)
    try:
        found = adopt(adopted, verbose=False)
        parity = _compared(expected, _results(adopted, batch))
        trains = False
        with suppress(Exception):  # it may have no training mode, whoever computes it
            trains = bool(_results(model, batch, seed=1))
        if trains:
            _results(adopted, batch, seed=1)
    except Exception as error:
        traceback.print_exc()
        return "", "", "", "", f"no: {type(error).__name__}: {str(error)[:200]}"
    norms = f"{sum(site.fused for site in found.norms)} of {len(found.norms)}"
    return norms, _fused(found), _in_one_kernel(found.rotary), _in_one_kernel(found.mlps), parity


def _fused(found: Adoption) -> str:
    trials = found.blocks.values()
    adds, sums = sum(len(trial.norms) for trial in trials), sum(len(trial.sums) for trial in trials)
    features = dict.fromkeys(f for trial in trials for norm in (*trial.norms.values(), *trial.sums) for f in norm)
    modulated = sum(len(trial.modulated) for trial in trials)
    kinds = (adds, "adds"), (modulated, "modulated"), (sums, "sums")
    counts = ", ".join(f"{count} {what}" for count, what in kinds if count)
    counts = counts or ("none" if found.left else "none: no block with a replaced norm is found")
    why = f"; {len(found.left)} blocks left: {next(iter(found.left.values()))}" if found.left else ""
    return counts + (f", with {', '.join(features)}" if features else "") + why


def _in_one_kernel(lines: list[tuple[str, str]]) -> str:
    """Of how many modules, or why of none; empty for a model without."""
    fused = [what for _, what in lines if what.endswith("in one kernel")]
    if not fused:
        return next((f"0 of {len(lines)}: {what.partition('left alone: ')[2]}" for _, what in lines), "")
    norms = ", with norms" if all(" with " in what for what in fused) else ""
    return f"{len(fused)} of {len(lines)} in one kernel{norms}"


def _compared(expected: dict[str, Tensor], found: dict[str, Tensor]) -> str:
    if expected.keys() != found.keys():
        return f"no: {', '.join(sorted(expected.keys() ^ found.keys())[:3])} is there in one of them only"
    largest = max(float(t.norm()) for name, t in expected.items() if name.startswith("gradient"))
    for name, a in expected.items():
        error = float((found[name] - a).norm()) / max(float(a.norm()), 1e-4 * largest, 1e-12)
        if not error < 3e-3:
            return f"no: {name} differs by {error:.2g}"
    return "yes"


if __name__ == "__main__":
    main(sys.argv[1:])
