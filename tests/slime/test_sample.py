"""slime's Sample (rlpipe.slime.sample)."""

from __future__ import annotations

from argparse import Namespace

from rlpipe.slime.sample import Sample
from rlpipe.types import Status

PLAIN = Namespace(sglang_speculative_algorithm=None)


def test_counts_of_several_turns_add_up():
    sample = Sample()
    info = {"finish_reason": {"type": "stop"}, "prompt_tokens": 10, "cached_tokens": 4}
    info |= {"spec_accept_token_num": 3, "spec_draft_token_num": 4, "spec_verify_ct": 2}
    for _ in range(2):
        sample.append_response_tokens(PLAIN, tokens=[], meta_info=info)
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.4
    assert sample.spec_info.spec_accept_token_num == 0
    drafting = Namespace(sglang_speculative_algorithm="EAGLE")
    sample.append_response_tokens(drafting, tokens=[], meta_info=info | {"completion_tokens": 6})
    assert sample.spec_info.spec_accept_rate == 0.75
    assert sample.spec_info.spec_accept_length == 3.0


def test_a_sample_survives_its_dictionary_with_attributes_of_the_user():
    sample = Sample(tokens=[1, 2, 3], response_length=2, status=Status.TRUNCATED, mine="x")
    sample.prefix_cache_info.cached_tokens = 5
    again = Sample.from_dict(sample.to_dict())
    assert (again.tokens, again.response_length) == ([1, 2, 3], 2)
    assert (again.status, vars(again)["mine"]) == (Status.TRUNCATED, "x")
    assert again.prefix_cache_info == sample.prefix_cache_info


def test_an_unknown_finish_reason_leaves_the_status():
    sample = Sample()
    sample.append_response_tokens(PLAIN, tokens=[], meta_info={"finish_reason": {"type": "new"}})
    assert (sample.status, sample.finish_reason) == (Status.PENDING, "new")
