"""Adapters (LoRA) in our SGLang servers, with `sync.transport: adapter`.

    POST /rlpipe/load_adapter    unload all adapters → load one → take its name as weight version

`push_routes` adds the endpoint, for a server that is paused and idle. A request names no adapter.
The server gives it the adapter of the weight version that it reports, if there is one; so tokens
and weight version cannot differ. SGLang keeps a prefix cache for each loaded adapter.

Seen on SGLang 0.5.21: tensors travel as the pickle of {name: tensor}, one copy for each rank.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from rlpipe.config.train import LoraConfig
from rlpipe.system.parts import Parts

LOAD = "/rlpipe/load_adapter"
SLOTS = 2
"""Adapters in device memory. Requests before the first push run without an adapter, which SGLang
counts as one."""


def server_arguments(lora: LoraConfig, *, on_cpu: bool) -> dict[str, object]:
    """Return SGLang's arguments of a server for adapters with these settings."""
    return {
        # Other kernels need Triton.
        **({"lora_backend": "torch_native"} if on_cpu else {}),
        "enable_lora": True,
        "max_lora_rank": lora.rank,
        "lora_target_modules": list(lora.target_modules),
        "max_loras_per_batch": SLOTS,
    }


def hook() -> None:
    """Register the hook that names the adapter of each request."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{manager}._validate_and_resolve_lora", name_adapter, HookType.AROUND)


async def name_adapter(
    original: Callable[..., Awaitable[None]], manager: Any, request: Any
) -> None:
    """Give a request the adapter of the weight version, if the request names none.

    Runs after the wait of a paused server, under the lock that keeps weights unchanged.
    """
    name = manager.config_value("weight_version")
    if (
        manager.enable_lora
        and not request.lora_path
        and name in manager.lora_registry.get_all_adapters()
    ):
        request.lora_path = name if request.is_single else [name] * len(request.rid)
        # SGLang has cut a batch into single requests before. Each counts as a use of its adapter
        # until it ends.
        for single in vars(request).get("_sub_obj_cache", {}).values():
            single.lora_path = name
    await original(manager, request)


async def load_only(manager: Any, body: dict[str, Any], parts: Parts) -> None:
    """Replace all adapters of a server by one. Raises: ValueError with SGLang's message.

    `body`: `name`, which becomes the weight version, `config` of PEFT, and `tensors` in base64.
    """
    from sglang.srt.managers.io_struct import (
        LoadLoRAAdapterFromTensorsReqInput,
        UnloadLoRAAdapterReqInput,
        UpdateWeightVersionReqInput,
    )

    with parts.part("unload"):
        for name in list(manager.lora_registry.get_all_adapters()):
            _require(await manager.unload_lora_adapter(UnloadLoRAAdapterReqInput(lora_name=name)))
            # SGLang would load an unloaded adapter again from its files, and this one has none.
            manager.lora_ref_cache.pop(name, None)
    with parts.part("load"):
        request = LoadLoRAAdapterFromTensorsReqInput(
            lora_name=body["name"],
            config_dict=body["config"],
            serialized_named_tensors=[body["tensors"]] * manager.server_args.tp_size,
        )
        _require(await manager.load_lora_adapter_from_tensors(request))
    # Also of the schedulers, which report the version of each token.
    await manager.update_weight_version(UpdateWeightVersionReqInput(new_version=body["name"]))


def _require(answer: Any) -> None:
    if not answer.success:
        raise ValueError(answer.error_message)
