"""Settings of an engine's server (rlpipe.actors.engines.engine.EngineSpec)."""

from pathlib import Path

from rlpipe.actors.engines.engine import EngineSpec
from rlpipe.actors.specs import ClusterSpec
from rlpipe.config.load import load_run, warm_start_overrides


def test_a_run_uses_the_engines_of_its_warm_start(tmp_path: Path):
    """Another spec would start all servers again after the warm start."""
    run = load_run("spell_backward")
    assert run.warm_start is not None
    warm_start = load_run(run.warm_start, warm_start_overrides(run), "spell_backward.warm_start")
    first, second = (
        EngineSpec.of(ClusterSpec(config, str(tmp_path), "model", "store"), config.cluster, None)
        for config in (warm_start, run)
    )
    assert first == second
