"""A policy of a config as a folder of Hugging Face: for export, and for engines."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from curax import hub
from curax.models import export, pretrained, transformer
from curax.settings.config_paths import option, unbound
from curax.settings.groups import Fields
from curax.settings.sizes import checkpoint_of
from curax.types import Task


def is_possible(config: Fields) -> bool:
    """Whether the model is one that Hugging Face has a format for."""
    return unbound(config.model) in (pretrained.model, transformer.model)


def has_adapters(config: Fields) -> bool:
    """Whether what is trained are adapters of a checkpoint."""
    of_checkpoint = unbound(config.model) is pretrained.model
    return bool(of_checkpoint and option(config.model, "lora_rank"))


def write(
    destination: str | Path,
    config: Fields,
    task: Task,
    params: Any,
    *,
    adapter: bool = False,
    dtype: str | None = None,
    card: str | None = None,
) -> None:
    """Write the checkpoint or adapter of a policy, in the format that it began from.

    Args:
        destination: folder that does not exist yet; it appears when it is whole.
        config: of the run, whose model `is_possible`.
        task: of the run.
        params: all of the policy's, on this host.
        adapter: the adapters alone, where it `has_adapters`.
        dtype: of a model that came from no checkpoint; None: as it was trained.
        card: README.md; None: that of the source, if there is any.

    Raises:
        ValueError: Hugging Face has no format for it, in a sentence.
        OSError: the folder cannot be written.
    """
    alpha = option(config.model, "lora_alpha")
    details: Mapping[str, Any] = {"form": task.prompt_form, "card": card}
    if adapter:
        base = checkpoint_of(config)
        name = hub.parsed(base, "model")
        base, revision = name[:2] if name else (base, None)
        export.export_adapter(
            destination,
            params,
            base=base,
            revision=revision,
            lora_alpha=alpha,
            **details,
        )
    elif unbound(config.model) is pretrained.model:
        source = hub.checkpoint(checkpoint_of(config))
        export.export(source, params, destination, lora_alpha=alpha, **details)
    else:
        names = ("head_dim", "rope_theta", "norm_eps", "rope_scaling")
        export.write_new(
            destination,
            params,
            dtype=getattr(jnp, dtype or params["embed"].dtype.name),
            extra={"eos_token_id": list(task.end), "pad_token_id": task.pad},
            tokenizer=task.tokenizer,
            lora_alpha=alpha,
            **details,
            **{name: option(config.model, name) for name in names},
        )
