"""Store the values of a model over a data set: `harvest(model, data, where, to=folder)`.

- `harvest`: runs the model and stores the values; continues after a crash → `Store`

docs/harvesting.md describes padding, statistics, many ranks, and the arithmetic.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from hookline.errors import HarvestError, HooklineError
from hookline.harvests.background_thread import BackgroundThread
from hookline.harvests.fingerprints import digest
from hookline.harvests.harvest_plan import describe, plan_for, refuse_changes
from hookline.harvests.harvest_statistics import RankStatistics, are_sound
from hookline.harvests.progress import Progress
from hookline.harvests.rank_batches import BatchSource, RankShare, rank_and_world_size
from hookline.harvests.rank_completion import earlier, finish, open_writer, unfinish
from hookline.harvests.row_extraction import BatchRows, RowExtractor, RowOptions, rows_in, sizes_in
from hookline.places.resolution import Where
from hookline.statistics.measuring import Statistics
from hookline.storage.store import Store
from hookline.storage.store_writer import StoreWriter
from hookline.torch_checks import require

__all__ = ["harvest"]

_Item = tuple[int, int, BatchRows]  # the number of a batch, what it is known by, and its rows


def harvest(
    model: nn.Module,
    data: Any,
    where: Where,
    *,
    to: str | os.PathLike[str],
    at: Any = None,
    transform: Callable[[Any], Any] | None = None,
    dtype: torch.dtype | None = None,
    stop: bool | Literal["auto"] = "auto",
    mask: str | Callable[[Any], Any] | None = None,
    ids: str | Callable[[Any], Any] | None = None,
    forward: Callable[[Any, Any], Any] | None = None,
    statistics: Statistics | None = None,
    quiet: bool = False,
) -> Store:
    """Run a model over data and store the values at places; the same call resumes after a stop.

    >>> import tempfile
    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))
    >>> data = torch.randn(100, 4).split(32)
    >>> store = harvest(model, data, "1", to=tempfile.mkdtemp() + "/acts", quiet=True)
    >>> len(store), store["1"].shape
    (100, torch.Size([100, 3]))

    Args:
        model: any module. It runs in the mode in which it is, without gradients.
        data: batches: a DataLoader, a list, any iterable, or a function that returns one (called
            with the number of the first batch that is needed, if it takes an argument). A tensor
            is the model's argument, a tuple or list are its arguments, a dict its arguments by
            name, any other object is its argument. They must come in the same order each time.
        where: places, or anything else that `select` takes.
        to: the folder of the store. A harvest that was stopped there is completed.
        at: store only this slice of each value, or the result of a function of it; `last_token`
            itself, with a mask, is the last token of each sequence.
        transform: a function of the value (after `at`); what it returns is stored.
        dtype: how to store floating-point values.
        stop: "auto" ends each forward after the last place that is needed, unless the rest of it
            draws random numbers or changes buffers; True always does, once each place has fired,
            and takes the first call of each; False never.
        mask: which positions of a sequence are stored, nonzero for tokens and zero for padding: the
            name of a part of the batch, or a function of it. Samples then vary in length.
        ids: a number or a word for each sample: the name of a part of the batch, or a function of
            it. By default, samples are numbered in the order of the data. A part of a dict that is
            named here or as the mask is given to the model only if it takes such an argument.
        forward: a function of the model and a batch that runs the model on the batch.
        statistics: `Mean()`, `TopK(k=5)` and so on, measured from the stored rows and saved in
            the folder `statistics` of the store, for `Measurements.load`.
        quiet: show neither the plan nor the progress, which go to stderr.

    First the plan is shown; a harvest that does not fit on the disk is refused. Another thread
    writes while the model runs. After Ctrl-C, a crash or kill -9 the store is sound, and the same
    call completes it, without duplicates and without gaps. Another model, other places, options
    or data are refused.

    Under torchrun and the like (the variables RANK and WORLD_SIZE) each rank takes its share of
    the batches. Rank 0 waits for the others and returns the whole store; the stores that the others
    return may lack rows that are still being written.
    """
    require("tools")
    options = RowOptions(at, transform, dtype, stop, mask, ids, forward)
    rank, world = rank_and_world_size()
    work = _Harvest(
        RowExtractor(model, where, options), BatchSource(data), Path(to).absolute(), rank, world
    )
    if statistics is not None:
        work.measuring = RankStatistics(statistics, work.folder, rank, world)
    work.progress = Progress(quiet=quiet or rank > 0)
    try:
        work.run()
    finally:
        work.progress.end()
    return Store.open(work.folder)


class _Harvest:
    """The harvest of one rank."""

    measuring: RankStatistics | None = None
    progress: Progress
    writer: StoreWriter
    grown = False  # True once samples came: harvest.json is removed then

    def __init__(
        self, extractor: RowExtractor, source: BatchSource, folder: Path, rank: int, world: int
    ) -> None:
        self.extractor, self.source, self.folder = extractor, source, folder
        self.world = world
        self.wanted = describe(extractor, world)
        refuse_changes(folder, self.wanted)
        before = earlier(folder, rank)
        self.before, self.mark = before, before.mark
        extractor.go_on(before.series)
        self.share = RankShare(rank, world, self.mark.get("batch", -1))
        self.numbered = before.samples  # samples that have an id, of a single rank
        self.named: tuple[int, Any] = -1, None  # the number of a batch, and its ids
        self.sizes: dict[Any, int] = {}  # in batch 0, of the tensors that may hold the samples
        # The batch that is smaller than the first, of several ranks: samples behind it would be
        # numbered wrongly.
        self.short = self.share.last if self.mark.get("short") else None

    def run(self) -> None:
        """Write the missing part of this rank's share, and finish."""
        self.source.begin(self.share.rank if self.share.last < 0 else self.share.last)
        with closing(self._batches()) as batches:  # else an error keeps workers that load them
            self._run(batches)

    def _run(self, batches: Iterator[tuple[int, Any]]) -> None:
        length = self.source.length
        begun = [self._item(*first) for first in islice(batches, 1)]
        if begun:
            self._plan(begun[0][2], length)
            if self.measuring is not None:
                self.measuring.check(begun[0][2].ids)
        elif self._is_complete():
            self.progress.show(f"complete: {str(self.folder)!r}")
            return
        with open_writer(self.folder, self.share.rank, self.wanted) as self.writer:
            if (self.writer.mark, self.writer.samples) != (self.mark, self.before.samples):
                raise HarvestError(
                    f"A harvest was to go on in {str(self.folder)!r}.",
                    "Another process has written there as the same rank in the meantime.",
                    "Run it again, once, to see whether something is missing.",
                )
            if self.measuring is not None:
                self.measuring.catch_up()
            if begun:
                self._write_all(begun, batches)
                self.progress.end()
            self._save()
            kinds = None if self.measuring is None else self.measuring.kinds
            done = {"done": True, "batches": self._count(), "kinds": kinds}
            self.writer.note({**self.writer.mark, **done, "length": self.source.batches})
            if self.share.rank == 0 and self.world > 1:
                self.progress.show("done with the share of rank 0; waiting for the others")
            finish(self.writer, self.world, kinds)
        self.progress.show(f"done: {str(self.folder)!r}")

    def _is_done(self) -> bool:
        """Return True if this rank has written its share of data of this length."""
        return bool(self.mark.get("done")) and self.mark.get("length") == self.source.batches

    def _is_complete(self) -> bool:
        """Return True if there is nothing to write; the folder may even be read-only."""
        measured = self.measuring is None or (
            self.mark.get("kinds") == self.measuring.kinds and are_sound(self.folder)
        )
        return self._is_done() and measured and (self.folder / "harvest.json").exists()

    def _plan(self, batch_rows: BatchRows, length: int | None) -> None:
        share = self.share
        batches = None if length is None else share.done() + share.size(length)
        stops = self.extractor.stops
        plan = plan_for(batch_rows, self.folder, batches, share.done(), self.world, stops)
        self.progress.show(repr(plan))
        plan.check_space()
        self.progress.begin(batches, share.done())

    def _write_all(self, begun: list[_Item], batches: Iterator[tuple[int, Any]]) -> None:
        try:
            with BackgroundThread(self._write) as background:
                background.put(begun.pop())  # whoever keeps it keeps its memory for the whole run
                for number, batch in batches:
                    background.put(self._item(number, batch))
        except BaseException as error:
            with suppress(Exception):  # the first error counts; what is not saved is made again
                self._save()
            # An error of ours would come again; one of the disk, the data or the model may not.
            recurs = isinstance(error, HooklineError) and not isinstance(error.__cause__, OSError)
            error.add_note(
                f"hookline: the store in {str(self.folder)!r} is sound and has "
                f"{self.writer.samples} samples"
                + ("." if recurs else "; the same harvest again goes on from there.")
            )
            raise

    def _save(self) -> None:
        """Save the statistics, unless they are ahead of the written rows."""
        measuring = self.measuring
        if measuring is not None and measuring.samples == self.writer.samples:
            measuring.save(self._count(), now=True)

    def _item(self, number: int, batch: Any) -> _Item:
        return number, self._known(number, batch), self._take(number, batch)

    def _write(self, item: _Item) -> None:
        """Write a batch, its statistics and its mark, all or nothing. Runs on the thread."""
        number, known, batch_rows = item
        mark: dict[str, Any] = {"batch": number, "known": known}
        if number == self.short:
            mark["short"] = True
        if not batch_rows.samples:
            self.writer.note(mark)
        else:
            if not self.grown:
                self.grown = True
                unfinish(self.folder)
            if self.measuring is not None:
                self.measuring.update(batch_rows.rows, batch_rows.samples, batch_rows.ids)
            self.writer.append(batch_rows.rows, ids=batch_rows.ids, mark=mark)
            if self.measuring is not None:
                self.measuring.save(self._count())
        self.progress.step(rows_in(batch_rows.rows))

    def _count(self) -> int:
        last: int = self.writer.mark.get("batch", -1)
        return RankShare(self.share.rank, self.world, last).done()

    # -- the batches, and that they are the same --------------------------------------------------

    def _batches(self) -> Generator[tuple[int, Any]]:
        """Yield the batches of this rank; all checks are made before the first one."""
        number = -1
        checked = self.share.last < 0
        for number, batch in self.source.numbered(self.share):
            if number == 0 and not self.source.skips:
                self.sizes = sizes_in(batch)
                self.wanted["data"] = self._known(number, batch)
                refuse_changes(self.folder, self.wanted)
                if self._is_done() and self.source.length is not None and not self.source.jumps:
                    return  # as long as before, and all of it would have to be loaded
            if number == self.share.last:
                checked = True
                if self._known(number, batch) != self.mark.get("known"):
                    self._refuse(f"Batch {number}, the last one that was stored, differs.")
            if self.share.takes(number):
                if not checked:
                    self._refuse(f"Batch {self.share.last}, the last one stored, is missing.")
                self._refuse_behind_short(number)
                yield number, batch
        self._refuse_behind_short(self.source.last)
        if number < 0 and not self.source.skips:
            raise HarvestError(
                f"A harvest into {str(self.folder)!r} was asked for.",
                "The data has no batches; a generator that was gone through before has none left.",
                "Give a list, a loader, or a function that returns batches.",
            )
        if not checked:
            self._refuse(f"It ends before batch {self.share.last}, the last one that was stored.")

    def _known(self, number: int, batch: Any) -> int:
        """Return a digest of a batch: of its ids if it has some, else of its content."""
        own = self._ids(number, batch)
        return digest(batch if own is None else own)

    def _ids(self, number: int, batch: Any) -> Any:
        """Return the ids that the caller gives a batch; asked for once, as a function may count."""
        if number != self.named[0]:
            self.named = number, self.extractor.options.ids_of(batch)
        return self.named[1]

    def _refuse(self, found: str) -> None:
        raise HarvestError(
            f"A harvest was to go on in {str(self.folder)!r}.",
            f"The data is not the same: {found}",
            "Give the data in the same order each time (shuffle=False), or give ids=, which are "
            "then compared instead. Or choose another folder.",
        )

    def _take(self, number: int, batch: Any) -> BatchRows:
        batch_rows = self.extractor.take(batch, self._ids(number, batch))
        if batch_rows.ids is not None:
            return batch_rows
        if self.world == 1:
            first = self.numbered
            self.numbered += batch_rows.samples
        else:
            first = number * self._size(number, batch_rows.samples, sizes_in(batch))
        ids = range(first, first + batch_rows.samples)
        return BatchRows(batch_rows.rows, batch_rows.samples, ids)

    def _size(self, number: int, samples: int, sizes: dict[Any, int]) -> int:
        """Return the number of samples of batch 0, which another rank may run."""
        self.sizes = {k: size for k, size in self.sizes.items() if sizes.get(k) == samples}
        found = set(self.sizes.values())
        if len(found) != 1 or samples > max(found):
            shown = " or ".join(map(str, sorted(found))) or "nobody knows how many"
            told = f"It has {samples}; the first batch has {shown}"
            told += ", as the data is a function of the number to begin with" * self.source.skips
            raise self._unnumbered(number, f"{told}.")
        if samples < max(found):
            self.short = number
            self._refuse_behind_short(self.source.last)
        return found.pop()

    def _refuse_behind_short(self, number: int) -> None:
        """Raise if a batch follows one that is smaller than the first."""
        if self.short is not None and number > self.short:
            found = f"It has fewer than the first batch, and is not the last: {number} is there."
            raise self._unnumbered(self.short, found)

    def _unnumbered(self, number: int, found: str) -> HarvestError:
        return HarvestError(
            f"The samples of batch {number} were to be numbered, on {self.world} ranks.",
            found,
            "Give ids=, or a function without an argument."
            if self.source.skips
            else "Let all batches but the last have the same size, or give ids=.",
        )
