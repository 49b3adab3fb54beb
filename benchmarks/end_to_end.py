"""FlowTrain in all modes, its ablations, ``mode: auto``, and outside peers, on two cores: real tokens a second.

python benchmarks/end_to_end.py [--traces DIRECTORY] [--models-dir DIRECTORY] [--rounds N] [--only NAME ...] [--json]

Models and mixes are those of benchmarks/modes.py. All train the same samples in the same order from the same weights in
float32, with the same optimizer and learning rate, one run after the other in every round, each order rotated; first
losses must agree. ``auto`` plans from a profile that is measured first. Peers are HF Trainer with a padded collator,
TRL's SFTTrainer and Ray Data with an encoder pool, each with the best of the settings that short trials found: one
process with two threads or two with one, microbatches of one sample or as many as fit, sorted by cost within a step or
not where it can. Padding does not count.

Runs that --directory has of the same code are not repeated, so a stopped benchmark goes on. --report writes the
settings' sections of docs/results/end_to_end.md, and its picture. --emulated runs the papers' models on emulated
devices instead, each cell by itself. Exits with 1 if losses differ, or if a run fails.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from _end_to_end_contest import OURS, Contest, RayWhenNeeded
from _end_to_end_figures import figures_of
from _end_to_end_peers import PEERS, install
from _end_to_end_report import write_report
from _end_to_end_store import Setting, Store, code_version, newest
from _modes_data import QUICKSTART, REAL, ROOT
from _modes_runs import Workload
from _modes_workloads import MIXES, Prepared, prepare
from _report import Figure, emit

DIRECTORY = ROOT / "build" / "end_to_end"
RUNS = {False: "runs.jsonl", True: "quick.jsonl"}
"""Where runs are kept, with and without --quick."""
QUICK_STEPS = 14


def measure(prepared: list[Prepared], store: Store, args: argparse.Namespace) -> tuple[list[Figure], list[str]]:
    """Run what is missing, setting by setting; returns figures and what failed."""
    cluster, figures, failed = RayWhenNeeded(), [], []
    try:
        for model in prepared:
            for mix in args.mixes:
                setting = Setting(model.label, mix)
                workload = adapted(model.workloads[mix], args)
                contest = Contest(setting, workload, store, cluster, args.directory, args.only)
                contestants = contest.contestants()
                for number in range(args.rounds):
                    contest.round(contestants, number)
                failed += contest.failed
                figures += figures_of(setting, store.rounds(setting), contest.predicted, contest.stand_ins)
    finally:
        cluster.be(False)
    return figures, failed


def adapted(workload: Workload, args: argparse.Namespace) -> Workload:
    """The workload with the settings of the command line."""
    setting = workload.setting
    if args.quick:
        setting = replace(setting, steps=QUICK_STEPS)
    if args.encode_patches is not None:
        setting = replace(setting, encoder={**setting.encoder, "max_batch_patches": args.encode_patches})
    return replace(workload, setting=setting)


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, help="directory of ai2d.csv and synthdog.csv")
    parser.add_argument("--models-dir", type=Path, help="where scripts/real_models.py wrote its models")
    parser.add_argument("--layers", type=int, default=3, help="decoder layers that are kept of SmolLM2")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--models", nargs="+", choices=(QUICKSTART, REAL), help="default: all that there are")
    parser.add_argument("--mixes", nargs="+", default=list(MIXES), choices=MIXES)
    parser.add_argument("--only", nargs="+", choices=(*OURS, *PEERS), metavar="NAME", help=", ".join((*OURS, *PEERS)))
    parser.add_argument("--encode-patches", type=int, help="encoders.vision.max_batch_patches of all FlowTrain's runs")
    parser.add_argument("--directory", type=Path, default=DIRECTORY, help="keeps runs, profiles and peers' packages")
    parser.add_argument("--quick", action="store_true", help="short runs, kept apart from the others")
    parser.add_argument("--fresh", action="store_true", help="forget the runs and profiles of --directory")
    parser.add_argument("--report", action="store_true", help="write docs/results/end_to_end.md and its picture")
    parser.add_argument(
        "--also",
        nargs="+",
        default=[],
        metavar="TREE",
        help="git trees of flowtrain/ whose runs and profiles count as well, the newest first",
    )
    parser.add_argument("--json", action="store_true")
    emulated = parser.add_argument_group("emulated devices")
    emulated.add_argument("--emulated", action="store_true", help="run the papers' models on emulated devices instead")
    emulated.add_argument(
        "--cells", nargs="+", metavar="PART", help="cells whose name has a part, as vlm_6b.16.infovqa"
    )
    emulated.add_argument("--device", default="h200", help="the device that is emulated")
    emulated.add_argument("--steps", type=int, default=8, help="of each cell")
    emulated.add_argument("--step-s", type=float, default=4.0, help="wall time of a step, to which waits are scaled")
    return parser.parse_args()


def main() -> None:
    args = options()
    args.directory = args.directory.resolve()
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.fresh:
        runs = "emulated.jsonl" if args.emulated else RUNS[args.quick]
        for path in (args.directory / runs, *args.directory.glob("*.profile.json")):
            path.unlink(missing_ok=True)
    if args.emulated:
        from _end_to_end_emulated import run_emulated  # the other runs need nothing of it

        run_emulated(args)
        return
    if args.only is None or set(args.only) & set(PEERS):
        install(args.directory / "peers")
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:2])  # all later processes inherit it
    with tempfile.TemporaryDirectory() as scratch:
        prepared = prepare(
            Path(scratch),
            traces=args.traces,
            models_dir=args.models_dir,
            num_layers=args.layers,
            models=args.models,
            mixes=args.mixes,
        )
        lengths, patches = "traces" if args.traces else "drawn", args.encode_patches or "default"
        further = (lengths, f"{args.layers}-layers", f"{patches}-patches")
        also = [" ".join([tree, *further]) for tree in args.also]
        store = Store(args.directory / RUNS[args.quick], code_version(*further), also)
        figures, failed = measure(prepared, store, args)
    if args.report:
        origins = {Setting(each.label, name): mix.origin for each in prepared for name, mix in each.mixes.items()}
        found = {each: rounds for each in origins if (rounds := store.rounds(each))}
        drawn = newest(args.directory / RUNS[args.quick], also)
        write_report(found, figures, origins, sys.argv[1:], drawn, args.also)
    emit("end_to_end", figures, args.json)
    if failed:
        sys.exit("failed runs:\n" + "\n".join(failed))


if __name__ == "__main__":
    main()
