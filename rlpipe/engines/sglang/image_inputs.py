"""Images for SGLang: the pixels as the trainer reads them, in the JSON of a request.

    body["image_data"] = image_data(pixels, grids)

The body has `input_ids` with one placeholder token for every merged patch, and SGLang keeps these
ids. It takes the output of an image processor (`processor_output`), but JSON has no tensors. So the
arrays are base64, which a hook of our servers makes into tensors. A server of the user has no such
hook.
"""

from __future__ import annotations

import base64
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np

_DTYPES = ("float32", "int64")


def image_data(pixels: np.ndarray, grids: np.ndarray) -> list[dict[str, Any]]:
    """Return the images of one request.

    Shapes: pixels [patches, values] float32, of all images; grids [images, 3] int64.
    """
    return [
        {
            "format": "processor_output",
            "modality": "IMAGE",
            "pixel_values": _encoded(pixels),
            "image_grid_thw": _encoded(grids),
        }
    ]


def _encoded(array: np.ndarray) -> dict[str, Any]:
    assert str(array.dtype) in _DTYPES
    content = base64.b64encode(array.tobytes()).decode()
    return {"base64": content, "dtype": str(array.dtype), "shape": array.shape}


def decoded(item: Any) -> Any:
    """Return an item of `image_data` with tensors. Raises: ValueError if it is not one of ours."""
    # Not at the top: NumPy starts threads, and a process with threads cannot fork (`cpu_launch`).
    import numpy as np
    import torch

    if not isinstance(item, dict) or item.get("format") != "processor_output":
        return item
    tensors = {}
    for name, value in item.items():
        if isinstance(value, dict) and "base64" in value:
            if value.get("dtype") not in _DTYPES:
                raise ValueError(f"image_data: {name} has the dtype {value.get('dtype')!r}")
            array = np.frombuffer(base64.b64decode(value["base64"]), value["dtype"])
            tensors[name] = torch.from_numpy(array.reshape(value["shape"]).copy())
    return {**item, **tensors}


def decoded_all(images: list[Any]) -> list[Any]:
    """Return `image_data` of a request with tensors: items of a prompt, or a list for each prompt.

    An item `{"same_as": i}` means the items of prompt i. Raises: as `decoded`.
    """
    rows: list[Any] = []
    for row in images:
        first = row[0] if isinstance(row, list) and row else None
        if isinstance(first, dict) and "same_as" in first:
            rows.append([dict(item) for item in rows[first["same_as"]]])
        else:
            rows.append([*map(decoded, row)] if isinstance(row, list) else decoded(row))
    return rows


def _with_tensors(original: Any, manager: Any, request: Any, *arguments: Any, **more: Any) -> Any:
    """Make tensors of a request's images. Runs around SGLang's `generate_request`."""
    images = getattr(request, "image_data", None)
    if isinstance(images, list):
        request.image_data = decoded_all(images)
    return original(manager, request, *arguments, **more)


def hook() -> None:
    """Register the hook. It takes effect when SGLang loads its plugins."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    manager = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
    HookRegistry.register(f"{manager}.generate_request", _with_tensors, HookType.AROUND)
