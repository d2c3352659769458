"""Our side of `train`: one rank of `MegatronEngine`, as the trainer actor uses it."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from rlpipe.batch.packing import attention_length, plan
from rlpipe.engines.megatron.engine import MegatronEngine
from rlpipe.system.ports import free_port
from tools.bench.stopwatch import timed
from tools.bench.training import Measurement, Task

SCHEDULE_STEPS = 1000
HOST = "127.0.0.1"


def open_engine(model_dir: str, task: Task) -> MegatronEngine:
    """Return one rank with the weights of the directory and the configuration of the task."""
    config = task.config
    engine = MegatronEngine(
        model_dir,
        config.model,
        config.train,
        rollout_temperature=config.rollout.rollout_temperature,
        total_optimizer_steps=SCHEDULE_STEPS,
        rank=0,
        world_size=1,
        master=(HOST, free_port(HOST)),
        threads=torch.get_num_threads(),
        deterministic=config.deterministic,
    )
    engine.load_hf()
    return engine


class MegatronSide:
    """The engine and the packed batch; one per process."""

    def __init__(self, task: Task) -> None:
        self.engine = open_engine(task.model_dir, task)
        self.batch = task.batch
        model = json.loads((Path(task.model_dir) / "config.json").read_text())
        self.packing = plan(
            task.batch.lengths,
            global_batch_size=None,
            max_tokens=self.engine.max_tokens,
            data_parallel=1,
            attention_length=attention_length(model),
        )

    def measure(self) -> Measurement:
        """Score the batch, take an optimizer step, compute the state digest."""
        score_s, score_gib, _ = timed(lambda: self.engine.score(self.batch))
        train_s, step_gib, result = timed(lambda: self.engine.train(self.batch, self.packing))
        digest_s, _, _ = timed(self.engine.state_digest)
        return Measurement(
            score_s, train_s - digest_s, digest_s, score_gib, step_gib, result.steps[0]["grad_norm"]
        )
