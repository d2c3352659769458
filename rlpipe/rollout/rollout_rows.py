"""Store the rows of one rollout below the plans of its parts.

    plans/<part>/groups/   finished groups; a retry adopts them
    plans/<part>/cut/      tokens of groups that were cut off

If several shards have a group, the first shard counts. Of a group that was cut off several times,
the longest version counts: the later rollout continued the earlier one.

Entry points: `StoredRows`, and `MemoryRows` for evaluations.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import NamedTuple, Protocol

import numpy as np

from rlpipe.errors import ObjectMissing
from rlpipe.rollout.generate import FINISHED
from rlpipe.store.objects.files import Files
from rlpipe.store.parquet.rows import table_to_samples
from rlpipe.store.parquet.shards import ShardWriter, adopt, read_rows, split_by_size
from rlpipe.store.plans import Plans
from rlpipe.types import FileRecord, Plan, Sample

SHARD_BYTES = 16 * 2**20
"""Bytes of a shard before encoding, at most, if it has more than one group. A trainer rank that
scores reads the shards of its samples as a whole."""
Groups = dict[str, list[Sample]]
"""Samples by group id."""


class PlanPart(NamedTuple):
    """One part of an iteration's plan, with its digest."""

    digest: str
    plan: Plan


class Rows(Protocol):
    """Storage for the rows of a rollout. Called on threads, one call at a time."""

    def adopt(self, part: PlanPart) -> tuple[Groups, Groups]:
        """Return the groups that an earlier attempt left of a part: finished, and cut off."""
        ...

    def earlier(self, digest: str, group_ids: Collection[str]) -> Groups:
        """Return the rows of these groups below an earlier plan. Raises: ObjectMissing."""
        ...

    def finished(self, digest: str, group_ids: Collection[str]) -> Groups:
        """Return those of these groups that are finished below an earlier plan."""
        ...

    def write(
        self, part: PlanPart, groups: Sequence[Sequence[Sample]], *, cut: bool = False
    ) -> None:
        """Write groups. Return once they are durable."""
        ...


class StoredRows:
    """Rows in the store. `files` are the data files of the rollout's node."""

    def __init__(self, files: Files) -> None:
        self._files = files
        self._finished: list[FileRecord] = []
        self._cut: list[FileRecord] = []
        self._writers: dict[str, ShardWriter] = {}

    @property
    def files(self) -> list[FileRecord]:
        """Files of the rollout, in the order in which a reader searches them for a group."""
        # Finished groups first: one attempt may cut off a group that another attempt finished.
        return [*self._finished, *self._cut]

    def adopt(self, part: PlanPart) -> tuple[Groups, Groups]:
        """See `Rows`."""
        finished = adopt(self._files, Plans.groups_prefix(part.digest))
        cut = adopt(self._files, Plans.cut_prefix(part.digest), every=True)
        self._finished += [record for record, _ in finished]
        self._cut += [record for record, _ in cut]
        return (
            self._read(record for record, _ in finished),
            self._longest(record for record, _ in cut),
        )

    def earlier(self, digest: str, group_ids: Collection[str]) -> Groups:
        """See `Rows`."""
        groups: Groups = {}
        for prefix, read in (
            (Plans.groups_prefix(digest), self._read),
            (Plans.cut_prefix(digest), self._longest),
        ):
            missing = set(group_ids) - set(groups)
            shards = adopt(self._files, prefix, every=True) if missing else []
            rows = read(record for record, ids in shards if missing & set(ids))
            groups |= {
                group_id: samples for group_id, samples in rows.items() if group_id in missing
            }
        if missing := sorted(set(group_ids) - set(groups)):
            raise ObjectMissing(
                "groups of the buffer have no rows",
                where=self._files.url(f"plans/{digest}"),
                found=f"no {missing}",
            )
        return groups

    def finished(self, digest: str, group_ids: Collection[str]) -> Groups:
        """See `Rows`."""
        shards = adopt(self._files, Plans.groups_prefix(digest))
        rows = self._read(record for record, ids in shards if set(ids) & set(group_ids))
        return {
            group_id: rows[group_id]
            for group_id in group_ids
            if group_id in rows and all(sample.status in FINISHED for sample in rows[group_id])
        }

    def write(
        self, part: PlanPart, groups: Sequence[Sequence[Sample]], *, cut: bool = False
    ) -> None:
        """See `Rows`."""
        prefix = Plans.cut_prefix(part.digest) if cut else Plans.groups_prefix(part.digest)
        if prefix not in self._writers:
            self._writers[prefix] = ShardWriter(self._files, prefix, part.plan.iteration)
        sizes = [sum(map(_token_bytes, group)) for group in groups]
        for shard in split_by_size(groups, sizes, SHARD_BYTES):
            record = self._writers[prefix].write(shard)
            if cut:
                # Rows of this attempt continue the adopted ones, so they are searched first.
                self._cut.insert(0, record)
            else:
                self._finished.append(record)

    def _read(self, records: Iterable[FileRecord]) -> Groups:
        records = list(records)
        return by_group(table_to_samples(read_rows(self._files, records))) if records else {}

    def _longest(self, records: Iterable[FileRecord]) -> Groups:
        longest: Groups = {}
        for record in records:
            for group_id, samples in self._read([record]).items():
                held = longest.get(group_id)
                if held is None or num_response_tokens(samples) > num_response_tokens(held):
                    longest[group_id] = samples
        return longest


class MemoryRows:
    """Rows in memory. Nothing is adopted and nothing is stored."""

    def __init__(self) -> None:
        self.samples: list[Sample] = []

    def adopt(self, part: PlanPart) -> tuple[Groups, Groups]:
        """See `Rows`."""
        return {}, {}

    def earlier(self, digest: str, group_ids: Collection[str]) -> Groups:
        """See `Rows`."""
        raise ObjectMissing(
            "rows in memory have no earlier plan", where=digest, found=f"no {sorted(group_ids)}"
        )

    def finished(self, digest: str, group_ids: Collection[str]) -> Groups:
        """See `Rows`."""
        return {}

    def write(
        self, part: PlanPart, groups: Sequence[Sequence[Sample]], *, cut: bool = False
    ) -> None:
        """See `Rows`."""
        self.samples.extend(sample for group in groups for sample in group)


def by_group(samples: Iterable[Sample]) -> Groups:
    """Return samples by group id, in order."""
    groups: Groups = {}
    for sample in samples:
        groups.setdefault(sample.group_id, []).append(sample)
    return groups


def _token_bytes(sample: Sample) -> int:
    """Return the bytes of a sample's token ids, log-probs and experts."""
    experts = sample.rollout_routed_experts
    routed_bytes = 0 if experts is None else np.asarray(experts).nbytes
    return 4 * len(sample.prompt_ids) + 8 * len(sample.response_ids) + routed_bytes


def num_response_tokens(samples: Iterable[Sample]) -> int:
    """Return the number of response tokens of all samples."""
    return sum(len(sample.response_ids) for sample in samples)
