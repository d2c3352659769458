"""Send the adapters of a policy over HTTP from trainer rank 0 to each engine (`train.lora`).

Engines hold the frozen weights of the model directory from their start. A push replaces their only
adapter (`rlpipe.engines.sglang.adapters`), in one request to each engine.
"""

from __future__ import annotations

import asyncio
import base64
import pickle

from rlpipe.config.peft_directory import adapter_config
from rlpipe.sync.session import PushReport, Session, run_session
from rlpipe.sync.tensors import NamedTensors, exhaust
from rlpipe.sync.transports.base import Push, Transport


class AdapterTransport(Transport[PushReport]):
    """See `base.Transport`. `send` takes adapters by PEFT's names."""

    def send(self, tensors: NamedTensors, push: Push) -> PushReport:
        """See `Transport.send`. Must not be called on a running event loop."""
        stream = iter(tensors)
        if self.setup.rank > 0:
            return PushReport(push.stamp, size_bytes=sum(tensor.nbytes for _, tensor in stream))
        assert self.setup.lora is not None, "a policy without adapters"
        assert not push.check, "refused in the configuration"
        try:
            # Clones: pickle writes the whole storage of a view.
            content = {name: tensor.detach().cpu().clone() for name, tensor in stream}
        finally:
            exhaust(stream)
        size_bytes = sum(tensor.nbytes for tensor in content.values())
        packed = base64.b64encode(pickle.dumps(content)).decode()
        config = adapter_config(self.setup.lora, None)

        async def work(session: Session) -> None:
            await session.open(push.pause, begin=False)
            await session.each(
                "load the adapter", lambda engine: engine.load_adapter(push.stamp, config, packed)
            )
            session.count_bucket(len(content), size_bytes)
            await session.resume(sampling=push.resume)

        timeout_s = self.setup.sync.timeout_s
        return asyncio.run(run_session(push.engines, push.stamp, work, timeout_s=timeout_s))
