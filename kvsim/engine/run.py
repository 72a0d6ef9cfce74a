"""One (request, layer) under every policy of a run: decide, pick, attend, count."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kvsim.engine import account, model_scope
from kvsim.engine.attend import Dense, Held, HeldTruth, Past, attend, blocks, steps_per_block, truth_of, truth_read
from kvsim.engine.bank import Record
from kvsim.engine.bounds import against_truth
from kvsim.engine.by_tier import by_tier
from kvsim.engine.counterfactual import Counterfactual
from kvsim.engine.curves import Curves
from kvsim.engine.estimated import Estimated
from kvsim.engine.evidence import evidence
from kvsim.engine.evolve import Course, evolve_all
from kvsim.engine.explain import depths_of, regret
from kvsim.engine.fate import tiers_and_events
from kvsim.engine.lags import died, lags
from kvsim.engine.latent import Shared
from kvsim.engine.levels import levels
from kvsim.engine.offload import PageCache, offloaded
from kvsim.engine.pages import pages_of
from kvsim.engine.reads import Picked, Reader, ranking_of
from kvsim.engine.recurrence import Recurrence
from kvsim.engine.slack import SlackByAge
from kvsim.engine.source import Source
from kvsim.engine.turnover import SOON, Turnover
from kvsim.geometry import BEFORE
from kvsim.policies import allocate
from kvsim.policies.protocol import Chain
from kvsim.policies.read.everything import everything
from kvsim.policies.rules import Rule
from kvsim.policies.store.offload import offload

TABLES = (
    *("ledger", "heads", "curves", "plans", "tiers", "events", "explain", "slack", "evidence"),
    *("lags", "recurrence", "by_tier"),
)
Columns = dict[str, Any]
Tables = dict[str, list[Columns]]  # table name -> parts; a part's columns are arrays of one length, or one value for all its rows


@dataclass(frozen=True)
class Job:
    """A chain as it was asked for, and the kv heads it is for (None: all). limits: what each kv head may hold after prefill, where
    the layers share one budget (model_scope)."""

    chain: Chain
    heads: tuple[int, ...] | None = None
    limits: tuple[int, ...] | None = None


def run_layer(
    source: Source,
    jobs: Sequence[Job],
    *,
    steps: Sequence[int] | None = None,
    plans: bool = False,
    allocator: str = "head",
    explain: bool = False,
    heads_only: bool = False,
    tick: Callable[[], None] = lambda: None,
) -> list[Tables]:
    """The tables of every job. steps: the decode steps that are written (None: all captured); stateful policies run all of them.
    explain: how deep rankings would have to be read, too; heads_only: no table but heads, which is half the work where steps are few.

    A row's bytes depend on its policy and step alone: not on the other jobs, the steps chosen, or how the work is cut into blocks."""
    courses = [_course(source, job, explain) for job in jobs]
    records = evolve_all(source, courses)
    work = [
        _Work(
            source,
            job,
            course.chain,
            record,
            plans=plans,
            steps=steps,
            allocator=allocator,
            explain=explain,
            heads_only=heads_only,
        )
        for job, course, record in zip(jobs, courses, records, strict=True)
    ]
    wanted = np.ones(len(source.steps), bool) if steps is None else np.isin(source.steps, list(steps))
    back = max(SOON) if explain else 1  # steps before each: what was read then is what reads are compared with
    needed = np.array([wanted[i : i + back + 1].any() for i in range(len(wanted))], bool)
    places = np.arange(len(source.steps)) if any(w.all_steps for w in work) else np.flatnonzero(needed)
    for head in range(source.layer.kv_heads):
        mine = [w for w in work if w.job.heads is None or head in w.job.heads]
        for w in mine:
            w.begin(head, wanted)
        for index in blocks(source, places):
            dense = Dense(source, head, index)
            for w in mine:
                w.step(dense, wanted[index])
            dense.leave()
            del dense  # before the next one is made: what it keeps is large
            tick()
        for w in mine:
            w.end(head, wanted)
    for w in work:
        w.end_layer()
    return [w.tables for w in work]


def _course(source: Source, job: Job, explain: bool) -> Course:
    chain = allocate.for_layer(job.chain, source.layer)
    keep = chain.part("keep")
    return Course(chain, model_scope.limits_of(source, keep, job.limits), explain or keep.codecs is not None)


class _Work:
    """One job over one (request, layer), kv head by kv head."""

    def __init__(
        self,
        source: Source,
        job: Job,
        chain: Chain,
        record: Record | None,
        *,
        plans: bool,
        steps: Sequence[int] | None,
        allocator: str,
        explain: bool,
        heads_only: bool = False,
    ):
        self.heads_only = heads_only
        self.source, self.job, self.chain, self.record = source, job, chain, record
        shared = source.layer.shared_row_bytes is not None  # so are its pages
        self.plans, self.allocator, self.explain = plans, "layer" if shared else allocator, explain
        self.read, self.keep = self.chain.part("read"), self.chain.part("keep")
        self.codecs = self.chain.codecs
        self.by_rule = isinstance(self.read, everything) and not isinstance(job.chain.part("read"), everything)
        self.store, self.estimate = self.chain.part("store"), self.chain.part("estimate")
        cuts = self.record is not None and self.record.sets and not heads_only
        self.recurrence = Recurrence(source, self.record, explain) if self.record is not None and cuts else None
        beside = explain and self.record is not None
        self.all_steps = steps is not None and (self.read.refresh != 1 or isinstance(self.store, offload) or beside)
        self.tables: Tables = {name: [] for name in TABLES}
        pages = 0 if self.read.page is None else -(-source.request.total // self.read.page)
        self.shared = Shared(source, pages) if shared and not heads_only else None

    def begin(self, head: int, wanted: NDArray[np.bool_]) -> None:
        src, read = self.source, self.read
        self.past = Past(src, self.record, head)
        self.died = died(src, self.record, head) if self.explain and self.record is not None else None
        observed = self.record is not None and self.record.reads
        self.reader = (
            None if read.page is None or observed else Reader(read, src, head, steps_per_block(src.layer.group), self.record)
        )
        self.estimated = Estimated(self.estimate, src, self.record, head) if self.estimate else None
        self.cache = None
        if isinstance(self.store, offload):
            self.cache = PageCache(self.store, read.page, -(-src.request.total // read.page))
        self.curves = None
        self.turnover: Turnover | None = None
        self.slack: SlackByAge | None = None
        ranked = read.index is not None and BEFORE not in read.needs  # by what this layer's queries would say
        if self.explain and read.page is not None and ranked and read.refresh == 1:
            again = self.reader or Reader(read, src, head, steps_per_block(src.layer.group), self.record)
            self.turnover = Turnover(again, -(-src.request.total // read.page), src.layer.group)
            self.slack = SlackByAge(read.page, src.layer.key_dim, src.request.total)
        self.beside = Counterfactual(self.record, src.request.total, src.layer.group)
        if (
            not self.heads_only
            and read.read is not None
            and self.record is None
            and read.refresh == 1
            and read.shards is None
            and not isinstance(read.read, Rule)
            and wanted.any()
        ):
            t = src.t[wanted]
            first = src.layer.first_of_each(t)
            budgets = int((t // read.page - first // read.page + 1).min())
            self.curves = Curves(read.page, budgets, src.layer.row_bytes, read.heads)

    def step(self, dense: Dense, wanted: NDArray[np.bool_]) -> None:
        held = self.past.held(dense)
        truth = truth_of(dense, held, self.record, self.read.index)
        picked = self._picked(dense, held, truth)
        got = attend(dense, held, picked, self.record)
        group = dense.group
        heads = account.heads(self.chain, self.by_rule, dense, held, picked, got, truth, self.record)
        more, joined = self.estimated.columns(dense, got) if self.estimated else ({}, {})
        heads |= joined
        if self.heads_only:
            self._heads(dense, heads, wanted)
            return
        ledger = account.ledger(self.chain, self.job.chain, dense, held, picked, self.record)
        ledger |= {name: ledger[name] + x for name, x in more.items()}
        heads |= self.beside.columns(dense, held, picked, got)
        if self.explain:
            heads |= levels(dense, held, picked, got, self.record)
        pages = self._live_pages(held)
        if self.cache and picked is not None:
            changed, fetched, on_device = offloaded(self.cache, self.read, dense, held, picked)
            ledger, heads, pages = ledger | changed, heads | fetched, pages and on_device
        self._gather(dense, held, picked, wanted)
        steps_apart = self.turnover.columns(dense, held, picked, truth) if self.turnover and picked is not None else {}
        if not wanted.any():
            return
        steps = self.source.steps[dense.index]
        self._add("ledger", {"kv_head": dense.head, "step": steps} | ledger | {"_pages": pages}, wanted)
        self._heads(dense, heads, wanted)
        q_heads = dense.head * group + np.tile(np.arange(group), len(steps))
        if self.plans and self.source.request.evidence:
            self.tables["evidence"].append(evidence(dense, held, picked, wanted))
        self._of_the_dead(dense, held, picked, wanted, {"q_head": q_heads, "step": np.repeat(steps, group)})
        if self.turnover and self.slack and picked is not None and self.read.index is not None:
            columns = depths_of(self.read.index, picked, truth) | regret(self.read, dense, held, picked, truth) | steps_apart
            read_truth = truth if self.record is None else truth_read(dense, held, self.record)
            columns |= against_truth(dense, picked, read_truth, self.turnover.reader)
            self._add("explain", {"q_head": q_heads, "step": np.repeat(steps, group)} | columns, np.repeat(wanted, group))
            self.slack.add(dense, picked, truth, wanted)

    def _gather(self, dense: Dense, held: Held, picked: Picked | None, wanted: NDArray[np.bool_]) -> None:
        """What is told of more than one step, or of more than one head."""
        if self.curves and picked is not None:
            self.curves.add(dense, held, picked, wanted, ranking_of(self.read))
        if self.plans and picked is not None:
            self._plans(dense, picked, wanted)
        if self.recurrence:
            self.recurrence.add(dense, held, picked)
        if self.shared:
            self.shared.add(dense, held, picked)

    def _heads(self, dense: Dense, columns: Columns, wanted: NDArray[np.bool_]) -> None:
        group, steps = dense.group, self.source.steps[dense.index]
        q_heads = dense.head * group + np.tile(np.arange(group), len(steps))
        self._add("heads", {"q_head": q_heads, "step": np.repeat(steps, group)} | columns, np.repeat(wanted, group))

    def _of_the_dead(self, dense: Dense, held: Held, picked: Picked | None, wanted: NDArray[np.bool_], at: Columns) -> None:
        if self.died is None or self.record is None:
            return
        of = np.repeat(wanted, dense.group)
        self._add("lags", {"kv_head": dense.head} | at | lags(dense, self.died), of)
        self._add("by_tier", at | by_tier(self.chain, dense, held, picked, self.record), of)

    def end(self, head: int, wanted: NDArray[np.bool_]) -> None:
        if self.heads_only:
            return
        src = self.source
        if self.curves and self.curves.parts:
            self.tables["curves"] += self.curves.rows(head * src.layer.group)
        if self.slack and self.slack.parts:
            self.tables["slack"] += self.slack.rows(head * src.layer.group)
        if self.record is None:
            return
        tiers, events = tiers_and_events(src, self.record, self.codecs, head)
        chosen = {-1, *src.steps[wanted].tolist()}
        hold, prompt = self.keep.hold, src.request.prompt
        for row, numbers in zip(events, self.record.state, strict=True):
            t = prompt + row["step"]
            visible = t + 1 - src.layer.first_visible(t)
            stated = (
                {}
                if hold is None
                else {"asked": float(getattr(hold, "n", getattr(hold, "x", np.nan))), "asked_unit": type(hold).__name__}
            )
            row |= {"hold_tokens": allocate.hold_limit(self.keep, visible, src.request, src.layer)} | stated
            row["state_bytes"] = int(numbers[head]) * account.NUMBER
        for name, rows in (("tiers", tiers), ("events", events)):
            rows = [r for r in rows if r["step"] in chosen]
            columns = dict.fromkeys(c for r in rows for c in r)  # a column that only cuts have is null at other steps
            self.tables[name].append({"kv_head": head} | {c: [r.get(c) for r in rows] for c in columns})

    def end_layer(self) -> None:
        self._pages_of_layer()
        if self.shared and self.tables["ledger"]:
            self.shared.bill(self.tables["ledger"], 1 if self.read.page is None else account.page_rows(self.read))
        if self.recurrence:
            self.tables["recurrence"] += self.recurrence.rows(self.job.heads)

    def _pages_of_layer(self) -> None:
        """resident_page_bytes when a physical page holds its tokens' rows of all kv heads: it stays while any head needs one."""
        parts = self.tables["ledger"]
        if self.allocator != "layer" or self.read.page is None:
            return
        by_step: dict[int, set[int]] = {}
        for part in parts:
            for step, pages in zip(part["step"].tolist(), part["_pages"], strict=True):
                by_step.setdefault(step, set()).update(pages)
        for part in parts:
            part["resident_page_bytes"] = (
                np.array([len(by_step[s]) for s in part["step"].tolist()])
                * account.page_rows(self.read)
                * self.source.layer.row_bytes
            )

    def _picked(self, dense: Dense, held: Held, truth: HeldTruth) -> Picked | None:
        if self.read.page is None:
            return None
        if self.record is not None and self.record.reads:
            return _observed(self.record, dense, held, self.read.page)
        assert self.reader is not None
        steps, known = self.source.steps[dense.index], dense.rankings if self.record is None else None
        return self.reader.pick(steps, dense.t, held.pos, held.flags, dense.queries, truth, known)

    def _live_pages(self, held: Held) -> list[list[int]] | None:
        if self.allocator != "layer" or self.read.page is None:
            return None
        pages = pages_of(held.pos, self.read.page)
        return [pages.id[row].tolist() for row in pages.rows(held.after) > 0]

    def _plans(self, dense: Dense, picked: Picked, wanted: NDArray[np.bool_]) -> None:
        steps, one = self.source.steps[dense.index], self.read.heads != "each"
        ids, exists = picked.pages.id, (picked.rows > 0).sum(1)
        rows = [
            {
                "q_head": -1 if one else dense.head * dense.group + g,
                "step": int(steps[i]),
                "pages": ids[picked.chosen[i, g]].tolist(),
                "exists": int(exists[i]),
                "forced": ids[picked.chosen[i, g] & picked.forced[i]].tolist(),
            }
            for g in range(1 if one else dense.group)
            for i in np.flatnonzero(wanted)
        ]
        columns = {c: [row[c] for row in rows] for c in ("q_head", "step", "pages", "exists", "forced")}
        self.tables["plans"].append({"kv_head": dense.head, "page_size": self.read.page} | columns)

    def _add(self, table: str, columns: Columns, wanted: NDArray[np.bool_]) -> None:
        part = {}
        for name, x in columns.items():
            if isinstance(x, np.ndarray):
                x = x[wanted]
            elif isinstance(x, list):
                x = [y for y, ok in zip(x, wanted, strict=True) if ok]
            part[name] = x
        self.tables[table].append(part)


def _observed(record: Record, dense: Dense, held: Held, size: int) -> Picked:
    """The pages that an observer read at each step, on the page table of the block."""
    pages, n, group = pages_of(held.pos, size), len(dense.index), dense.group
    shape = (n, group, len(pages.id))
    chosen, score, forced = np.zeros(shape, bool), np.full(shape, -np.inf), np.zeros((n, len(pages.id)), bool)
    rounds, certified = np.zeros((n, group), np.int64), np.zeros((n, group), bool)
    scanned, sent, age = np.zeros((3, n), np.int64)
    proves = refreshes = False
    for i, at in enumerate(dense.index):
        one: Picked = record.reads[at][dense.head]
        place = np.searchsorted(pages.id, one.pages.id)
        chosen[i][:, place], score[i][:, place], forced[i, place] = one.chosen[0], one.score[0], one.forced[0]
        rounds[i], scanned[i], sent[i] = one.rounds[0], one.scanned[0], one.sent[0]
        if one.certified is not None:
            certified[i], proves = one.certified[0], True
        if one.age is not None:
            age[i], refreshes = one.age[0], True
    return Picked(
        pages,
        pages.rows(held.flags),
        chosen,
        score,
        None,
        forced,
        rounds,
        scanned,
        certified if proves else None,
        sent,
        age if refreshes else None,
    )
