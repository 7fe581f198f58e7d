"""Breaks the code on purpose, one fault at a time, and sees whether the tests notice.

    python scripts/mutations.py [-j 2] [--list] [WORDS ...]      # WORDS: only faults whose name holds one

Each fault is planted in a temporary copy of the tree, and the smallest part of the tests that should turn red
is run there. The same tests are first run without any fault: red means nothing where green was not possible.
Exit status 1 if a fault goes unnoticed, 2 if one cannot be planted or its tests cannot be run.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parent.parent
LIMIT_SECONDS = 240  # a fault may make a rank wait for ever


@dataclass(frozen=True)
class Mutation:
    """`old` must occur exactly once in `file`, so that a fault cannot quietly stop being planted."""

    fault: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]  # pytest's node ids

    def plant(self, tree: Path) -> None:
        path = tree / self.file
        text = path.read_text() if path.exists() else ""
        if text.count(self.old) != 1:
            raise LookupError(f"{self.fault!r}: {self.file} holds {text.count(self.old)} times, not once: {self.old!r}")
        path.write_text(text.replace(self.old, self.new))


ENGINE = "tests/engine/test_deepspeed.py"
MICRO = "tests/test_step.py::test_micro_batches_and_kept_graphs_are_invisible"
DROPOUT = "tests/test_step.py::test_the_second_forward_draws_the_same_dropout_as_the_first"
BANKED_LOSS = "tests/contrastive/test_memory_bank.py::test_float64_equals_autograd_over_the_concatenation"
EXACT_LOSS = "tests/contrastive/test_info_nce.py::test_float64_equals_autograd"
LOSS_ON_RANKS = (
    "tests/contrastive/test_info_nce.py::test_ranks_hold_shares_of_the_gradient_of_the_global_mean[2-False-48]"
)

MUTATIONS = [
    # -- the loss
    Mutation(
        "row and column LSE swapped",
        "clip_train/contrastive/softmax.py",
        "sweep(d_image, d_text, rows_of(pairs), row_lse=row_lse, col_lse=col_lse,",
        "sweep(d_image, d_text, rows_of(pairs), row_lse=col_lse, col_lse=row_lse,",
        (EXACT_LOSS,),
    ),
    Mutation(
        "row LSE used for texts on several ranks",
        "clip_train/contrastive/softmax.py",
        "sweep(d_text, None, cols_of(pairs), row_lse=col_lse, col_lse=row_lse,",
        "sweep(d_text, None, cols_of(pairs), row_lse=row_lse, col_lse=col_lse,",
        (LOSS_ON_RANKS,),
    ),
    Mutation(
        "positive left in the sums",
        "clip_train/contrastive/tiles.py",
        "        block.fill(t, S, 0.0)\n        rows[",
        "        rows[",
        (EXACT_LOSS,),
    ),
    Mutation(
        "positive's offset wrong on rank > 0",
        "clip_train/contrastive/tiles.py",
        "first = self.row - self.col  #",
        "first = 0  #",
        (LOSS_ON_RANKS,),
    ),
    Mutation(
        "column sums not added over the ranks",
        "clip_train/contrastive/softmax.py",
        "sums = sum_over_ranks(sums)[:, :R]  #",
        "sums = torch.stack([sum_over_ranks(sums.clone())[0], sums[1]])[:, :R]  #",
        (LOSS_ON_RANKS,),
    ),
    Mutation(
        "underflow of the stabiliser not noticed",
        "clip_train/contrastive/softmax.py",
        ".item() > SMALLEST_SUM:",
        ".item() >= 0:",
        ("tests/contrastive/test_info_nce.py",),
    ),
    Mutation(
        "a teacher's opinion with the wrong sign",
        "clip_train/contrastive/distill.py",
        "teacher, -weight, side, values=pairs)",
        "teacher, weight, side, values=pairs)",
        ("tests/contrastive/test_distill.py::test_float64_equals_autograd",),
    ),
    Mutation(
        "past copies of a sample are its negatives",
        "clip_train/contrastive/tiles.py",
        "        if self.ids is not None:\n",
        "        if self.ids is not None and False:\n",
        (BANKED_LOSS,),
    ),
    Mutation(
        "past images forgotten in the scale's gradient",
        "clip_train/contrastive/memory_bank.py",
        " + row_dots(T, from_past_images).sum()",
        "",
        (BANKED_LOSS,),
    ),
    Mutation(
        "past pairs that are no terms have a softmax",
        "clip_train/contrastive/memory_bank.py",
        "lse.new_full((self.N + self.M - len(lse),), torch.inf)",
        "lse.new_full((self.N + self.M - len(lse),), 20.0)",
        (BANKED_LOSS,),
    ),
    # -- the two passes
    Mutation(
        "logit_scale's gradient k times too large",
        "clip_train/contrastive/cache.py",
        "outcome.d_logit_scale / k",
        "outcome.d_logit_scale",
        (MICRO,),
    ),
    Mutation("no RNG replay", "clip_train/step.py", "        entry.rng.restore()\n", "", (DROPOUT,)),
    Mutation("random state not restored after pass 2", "clip_train/step.py", "    after.restore()\n", "", (DROPOUT,)),
    Mutation(
        "kept graphs' gradients in the wrong order",
        "clip_train/step.py",
        "gradients.pop())",
        "gradients.pop(len(gradients) - sum(e.graph_kept for e in cache.entries) - 1))",
        (f"{MICRO}[5-4]", f"{MICRO}[20-5]"),
    ),
    Mutation(
        "gradients not added over the ranks",
        "clip_train/plain_engine.py",
        "            dist.all_reduce_sum(p.grad)  #",
        "            #",
        ("tests/test_step.py::test_ranks_are_invisible[2-3-2]",),
    ),
    Mutation(
        "dropout keyed by place in the micro-batch",
        "clip_train/models/dropout.py",
        "splitmix64(splitmix64(sample_seeds) + layer_id)",
        "splitmix64(splitmix64(torch.arange(len(sample_seeds), device=sample_seeds.device)) + layer_id)",
        ("tests/models/test_clip.py::test_dropout_does_not_depend_on_the_micro_batch",),
    ),
    Mutation(
        "DDP inside an adapter is not seen",
        "clip_train/user_engine.py",
        "modules = model.modules() if",
        "modules = [model] if",
        ("tests/test_library.py::test_under_ddp_gradients_are_the_global_batchs_and_cross_the_network_once",),
    ),
    # -- the DeepSpeed engine
    Mutation(
        "factor world_size missing",
        "launcher/engine.py",
        "surrogate(features, gradients) * dist.world_size()",
        "surrogate(features, gradients)",
        (f"{ENGINE}::test_fp32_equals_plain_torch[2-5-1-sgd-1]",),
    ),
    Mutation(
        "clear_backward_seen_flag not called",
        "launcher/engine.py",
        "self.engine.optimizer.clear_backward_seen_flag()",
        "pass",
        (f"{ENGINE}::test_fp32_equals_plain_torch[1-7-2-sgd-3]",),
    ),
    Mutation(
        "the loss scale grows before the gradient is divided by it",
        "launcher/engine.py",
        "lambda overflow: update_scale(True) if overflow else None",
        "update_scale",
        (f"{ENGINE}::test_a_step_at_which_the_loss_scale_grows_is_a_whole_step[1]",),
    ),
    Mutation(
        "clip skipped at stage 0",
        "launcher/engine.py",
        "clip_grad_norm_(parameters, self._stage0_limit)",
        "clip_grad_norm_(parameters, math.inf)",
        (f"{ENGINE}::test_fp32_equals_plain_torch[1-7-2-sgd-0]",),
    ),
    Mutation(
        "clamp of logit_scale on the model's copy only",
        "launcher/engine.py",
        "piece.flat.narrow(0, piece.offset, piece.numel).clamp_(0, MAX_LOGIT_SCALE)",
        "pass",
        ("tests/test_mutations_found.py::test_the_master_copy_of_logit_scale_is_clamped[1]",),
    ),
    Mutation(
        "optimizer's step count not restored",
        "launcher/engine.py",
        'self.optimizer_steps = int(extra.get("optimizer_steps", 0))',
        "self.optimizer_steps = 0",
        (f"{ENGINE}::test_resuming_is_bitwise_on_the_same_layout_and_close_on_another[1-fp32]",),
    ),
    # -- the data
    Mutation(
        "lane cursor off by one",
        "clip_train/data/lanes.py",
        "self._cursor = cursor or Cursor()",
        "self._cursor = replace(cursor, taken=max(cursor.taken - 1, 0)) if cursor else Cursor()",
        ("tests/data/test_lanes.py::test_resume_after_any_sample_is_exact",),
    ),
    Mutation(
        "sample seed taken from the worker",
        "clip_train/data/pipeline.py",
        "image, text = self._decode(sample, slot.seed)",
        "image, text = self._decode(sample, slot.seed + (w.id if (w := get_worker_info()) else 0))",
        ("tests/data/test_loader.py::test_global_batches_are_the_same[1-2-2]",),
    ),
    Mutation(
        "a local block's checksum not looked at",
        "clip_train/storage/blocks.py",
        "if block_sum(data) == self._checksums.of(block):",
        "if True:",
        ("tests/data/test_index.py::test_any_flipped_byte_of_a_local_shard_stops_the_run",),
    ),
    Mutation(
        "a damaged archive believed at first sight",
        "clip_train/data/lanes.py",
        "if damages.count(str(e)) > REREADS:",
        "if True:",
        ("tests/data/test_lanes.py::test_a_header_broken_on_the_way_is_read_again_and_told",),
    ),
    Mutation(
        "shards that changed in content not noticed at resume",
        "clip_train/data/shard_list.py",
        "if a and b and a != b",
        "if False",
        ("tests/data/test_shard_list.py::test_a_change_is_named_and_refused_unless_allowed[changed]",),
    ),
    # -- batches of varying size, which nothing divides
    Mutation(
        "what another rank takes from a lane is not skipped",
        "clip_train/data/pipeline.py",
        "                        lane.skip()\n",
        "                        pass\n",
        ("tests/data/test_uneven.py::test_ranks_and_workers_change_nothing[5-2-0]",),
    ),
    Mutation(
        "every batch begins with lane 0",
        "clip_train/data/shares.py",
        "size = samples_below(P + G, lane, L) - samples_below(P, lane, L)",
        "size = samples_below(G, lane, L)",
        ("tests/data/test_uneven.py::test_the_order_is_what_its_definition_says",),
    ),
    Mutation(
        "a lane's position taken from the rank that speaks last",
        "clip_train/data/loader.py",
        'if lane not in newest or cursor["count"] > newest[lane]["count"]:',
        "if True:",
        ("tests/data/test_uneven.py::test_resumes_of_resumes",),
    ),
    Mutation(
        "lanes of later stages not read from the start",
        "clip_train/data/shares.py",
        "for size in sizes.distinct(stage)] + needed[:1]",
        "for size in sizes.distinct(stage)]",
        ("tests/data/test_uneven.py::test_ranks_and_workers_change_nothing",),
    ),
    Mutation(
        "micro-batches counted from the rank's own share",
        "clip_train/protocols.py",
        "counts = self.shares or (len(self),)",
        "counts = (len(self),)",
        ("tests/test_batch.py::test_every_rank_has_equally_many_chunks_and_none_is_empty",),
    ),
    Mutation(
        "local accumulation weighed by the rank's own share",
        "clip_train/step.py",
        "N = batch.global_size or len(batch) * dist.world_size()",
        "N = len(batch) * dist.world_size()",
        ("tests/test_uneven.py::test_ranks_and_micro_batches_that_do_not_divide_are_invisible[2-5]",),
    ),
    Mutation(
        "learning rate scaled once, to the last size",
        "launcher/train.py",
        "config.optim.peak_lr(sizes.at(step))",
        "config.optim.peak_lr(sizes.at(steps))",
        ("tests/launcher/test_schedule.py::test_metrics_tell_each_steps_own",),
    ),
    Mutation(
        "a ramp's sum without its last increment",
        "clip_train/batch.py",
        "moved = self.unit * floor_sum(i, abs(self.rise)",
        "moved = self.unit * floor_sum(i - 1, abs(self.rise)",
        ("tests/test_batch.py::test_sizes_and_their_sums",),
    ),
    # -- checkpoints
    Mutation(
        "commit written before the manifest",
        "clip_train/checkpoint/committing.py",
        '        store.put_bytes(f"{order.prefix}/{layout.MANIFEST}", order.manifest)\n'
        "        self._check_fence(store)\n",
        "        self._check_fence(store)\n"
        "        early = Commit(order.epoch, order.step, order.prefix, layout.sha256_of(order.manifest))\n"
        "        store.put_bytes(order.ref.name, early.to_bytes(), if_absent=True)\n"
        '        store.put_bytes(f"{order.prefix}/{layout.MANIFEST}", order.manifest)\n',
        ("tests/test_mutations_found.py::test_a_save_killed_between_any_two_writes_leaves_nothing_damaged",),
    ),
    Mutation(
        "files' hashes not looked at",
        "clip_train/checkpoint/files.py",
        "        whole = all(sha256_of_next(f, BLOCK_BYTES) == told for told in entry.blocks[first:end])\n",
        "        whole = True\n",
        ("tests/checkpoint/test_manager.py",),
    ),
    Mutation(
        "what another rank gives is kept in the wrong place",
        "clip_train/checkpoint/exchange.py",
        "            self._files[i].put(start, data[at : at + end - start])\n",
        "            self._files[i].put(start, data[: end - start])\n",
        ("tests/checkpoint/test_ranks.py::test_ranks_give_each_other_what_they_have_fetched",),
    ),
    Mutation(
        "no fence before the commit",
        "clip_train/checkpoint/committing.py",
        "        self._check_fence(store)\n",
        "",
        ("tests/checkpoint/test_manager.py::test_who_began_last_may_commit",),
    ),
    Mutation(
        "orphans removed without a grace",
        "clip_train/checkpoint/retention.py",
        "if ref in removed or (now - modified >= grace and not _is_named(storage, ref, attempt)):",
        "if True:",
        ("tests/checkpoint/test_manager.py::test_leftovers_of_killed_saves_go_after_a_grace",),
    ),
    Mutation(
        "a zombie's retention takes its successor's data for orphans",
        "clip_train/checkpoint/retention.py",
        "return attempt in own.in_flight or (ref is not None and ref.epoch > policy.epoch)",
        "return attempt in own.in_flight",
        ("tests/checkpoint/test_protocol.py",),
    ),
    Mutation(
        "a resume that believes its first listing",
        "clip_train/checkpoint/resume.py",
        "_LISTINGS = 5 ",
        "_LISTINGS = 1 ",
        ("tests/checkpoint/test_protocol.py::test_a_checkpoint_that_is_removed_while_it_is_chosen",),
    ),
    Mutation(
        "the one resumed from not protected",
        "clip_train/checkpoint/manager.py",
        "        self._protect = set(choice.protect)\n",
        "",
        ("tests/checkpoint/test_manager.py::test_retention_keeps_the_newest_and_the_one_resumed_from",),
    ),
    Mutation(
        "the snapshot's buffer free before it is written",
        "clip_train/checkpoint/pipeline.py",
        "                entry = write_snapshot(self.local, self._buffer, order)\n",
        '                self._tell_of("written", order)\n'
        "                time.sleep(0.2)\n"
        "                entry = write_snapshot(self.local, self._buffer, order)\n",
        ("tests/checkpoint/test_manager.py::test_a_snapshot_is_not_overwritten_while_it_is_written",),
    ),
    Mutation(
        "a save is put off by the own buffer only",
        "clip_train/checkpoint/schedule.py",
        "        if not dist.any_rank(busy):\n",
        "        if not busy:\n",
        ("tests/checkpoint/test_savers.py::test_a_save_that_comes_too_early_is_put_off",),
    ),
    Mutation(
        "a dead saver keeps the buffer",
        "clip_train/checkpoint/outcomes.py",
        "        self.writing, self.saver_died = None, True\n",
        "        self.saver_died = True\n",
        ("tests/checkpoint/test_savers.py::test_a_saver_that_two_ranks_share_is_killed",),
    ),
    Mutation(
        "rank 0 waits for the word of a rank whose saver has died",
        "clip_train/checkpoint/outcomes.py",
        "            return lost\n        return {}\n",
        "        return {}\n",
        ("tests/checkpoint/test_outcomes.py", "tests/checkpoint/test_savers.py::test_savers_that_are_killed"),
    ),
    Mutation(
        "an old attempt's end taken for the new one's",
        "clip_train/checkpoint/outcomes.py",
        '        if self.pending.get(told["step"]) != told["prefix"]:\n',
        '        if told["step"] not in self.pending:\n',
        ("tests/checkpoint/test_outcomes.py",),
    ),
    Mutation(
        "an own commit that nobody heard of taken for another process's",
        "clip_train/checkpoint/committing.py",
        " and there.prefix not in order.earlier",
        "",
        ("tests/checkpoint/test_savers.py::test_a_save_that_was_committed_locally_is_uploaded_by_the_next_saver",),
    ),
    # -- surviving
    Mutation(
        "a cancelled job is requeued",
        "launcher/attempts.py",
        """            outcome.terminated,
            "leave",""",
        """            False,
            "leave",""",
        ("tests/launcher/test_attempts.py::test_decisions",),
    ),
    Mutation(
        "failures count although the run comes further",
        "launcher/attempts.py",
        "failures = 0 if progress else failures + failed",
        "failures = failures + failed",
        ("tests/launcher/test_attempts.py::test_decisions",),
    ),
    Mutation(
        "the rank that waited is blamed for the hang",
        "launcher/marks.py",
        "if not mark.waiting]",
        "if mark.waiting]",
        ("tests/launcher/test_attempts.py::test_the_cause",),
    ),
    Mutation(
        "a signal is lost on a main thread in C",
        "launcher/liveness.py",
        "and self.stop.look():",
        "and self.stop.reason:",
        ("tests/launcher/test_liveness.py::test_a_signal_is_seen_while_the_main_thread_is_in_c",),
    ),
    Mutation(
        "the variables of another launcher are believed",
        "launcher/env.py",
        "if tasks <= 1 or (env.world_size",
        "if tasks >= 1 or (env.world_size",
        ("tests/launcher/test_env.py::test_mistakes_name_the_variable",),
    ),
]


def copy_of_the_tree(to: Path) -> Path:
    """What git tracks, as it lies there, and new files that are not ignored."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).is_file():
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, to / name)
    return to


def run_tests(tree: Path, tests: tuple[str, ...], *options: str) -> tuple[int, str]:
    """pytest's exit status (-1: it took too long) and what it printed."""
    command = [sys.executable, "-B", "-m", "pytest", "-p", "no:cacheprovider", "-rfE", *options]
    environment = {**os.environ, "PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            [*command, *tests], cwd=tree, env=environment, timeout=LIMIT_SECONDS, check=False,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    except subprocess.TimeoutExpired as e:
        out = e.stdout or ""
        return -1, out.decode(errors="replace") if isinstance(out, bytes) else out
    return done.returncode, done.stdout


def judge(status: int, output: str) -> tuple[str, str]:
    """("red", the test that caught it), ("green", ""), or ("error", why it tells nothing)."""
    if status == 0:
        return "green", ""
    if status == -1:
        return "red", f"still running after {LIMIT_SECONDS} s"
    failed = re.search(r"^FAILED (\S+)", output, re.MULTILINE)
    if status == 1 and failed:
        return "red", failed[1]
    return "error", output.strip().rsplit("\n", 8)[-1] or f"pytest ended with status {status}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*", help="only faults whose name holds one of these")
    parser.add_argument("-j", "--jobs", type=int, default=2, help="copies of the tree tested at once")
    parser.add_argument("--list", action="store_true", help="name the faults and end")
    args = parser.parse_args()
    chosen = [m for m in MUTATIONS if not args.words or any(word in m.fault for word in args.words)]
    if args.list:
        print("\n".join(f"{m.fault}: {m.file}" for m in chosen))
        return 0

    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(args.jobs):
            trees.put(copy_of_the_tree(Path(folder, str(i))))

        def without_a_fault(tests: tuple[str, ...]) -> tuple[int, str]:
            tree = trees.get()
            try:
                return run_tests(tree, tests)
            finally:
                trees.put(tree)

        def with_fault(mutation: Mutation) -> tuple[str, str]:
            tree = trees.get()
            whole = (tree / mutation.file).read_bytes() if (tree / mutation.file).exists() else b""
            try:
                mutation.plant(tree)
                return judge(*run_tests(tree, mutation.tests, "-x"))
            except LookupError as e:
                return "error", str(e)
            finally:
                (tree / mutation.file).write_bytes(whole)
                trees.put(tree)

        with ThreadPoolExecutor(args.jobs) as pool:
            every = sorted({test for m in chosen for test in m.tests})
            shares = [tuple(every[i :: args.jobs]) for i in range(min(args.jobs, len(every)))]  # none: all tests
            clean = list(pool.map(without_a_fault, shares))
            for status, output in clean:
                if status != 0:
                    print(output)
                    print("the tests are not green without a fault")
                    return 2
            print(f"{len(every)} selections of tests are green without a fault ({time.monotonic() - began:.0f} s)")
            verdicts = []
            width = max(len(m.fault) for m in chosen)
            for m, (colour, why) in zip(chosen, pool.map(with_fault, chosen), strict=True):
                print(f"{m.fault:{width}}  {colour:5}  {why}", flush=True)
                verdicts.append(colour)
    red = verdicts.count("red")
    print(f"{red} of {len(chosen)} faults turn the tests red ({time.monotonic() - began:.0f} s)")
    return 2 if "error" in verdicts else 0 if red == len(chosen) else 1


if __name__ == "__main__":
    sys.exit(main())
