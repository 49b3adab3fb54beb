"""The page of the benchmark of PipeWeaver's and FlowTrain's figures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean

from _pipeweaver_steps import Step
from _report import commit, machine

from flowtrain.types.plan import Degrees

_GIB = 2**30


@dataclass(frozen=True)
class Table1:
    """PipeWeaver's Table 1. dynamic: some steps."""

    text: Step
    static: Step
    denser: Step
    """As ``static`` with twice the images."""
    dynamic: Sequence[Step]
    few_patches: tuple[float, float]
    """Static and dynamic ratios with 169 patches an image."""
    images: float
    """Mean images of a sequence."""
    spread: float
    """Work of the costliest sequence over that of the cheapest."""
    partition: str

    @property
    def ratios(self) -> list[float]:
        """MFU of each drawn step over that of the language model."""
        return [step.mfu / self.text.mfu for step in self.dynamic]


@dataclass(frozen=True)
class Cell:
    """A configuration. words: memory strategy and reduction of gradients. step, words: None if nothing fits."""

    degrees: Degrees
    words: str | None
    step: Step | None

    @property
    def mfu(self) -> float:
        return self.step.mfu if self.step is not None else 0.0


@dataclass(frozen=True)
class Grid:
    """PipeWeaver's figure 13 for one global batch."""

    batch: int
    cells: Sequence[Cell]
    unlimited: Step
    """The paper's optimum with gradients summed once a step, whether it fits or not."""
    whole: Step
    """The same without sequence parallelism."""

    @property
    def best(self) -> Cell:
        return max(self.cells, key=lambda cell: cell.mfu)

    def of(self, degrees: Degrees) -> Cell:
        return next(cell for cell in self.cells if cell.degrees == degrees)


@dataclass(frozen=True)
class Scale:
    """MFU by mode on so many devices."""

    devices: int
    mfu: dict[str, float]


def report(
    table: Table1, layers: dict[int, float], grids: Sequence[Grid], xl: tuple[Cell, float], scales: Sequence[Scale]
) -> str:
    """Markdown."""
    host = machine()
    lines = [
        "# The simulator beside PipeWeaver's and FlowTrain's figures",
        "",
        "```",
        ".venv/bin/python benchmarks/pipeweaver.py --json --report docs/results/pipeweaver.md",
        "```",
        "",
        f"Commit {commit()}; {host['cpu']}, one core of {host['cores']}, Python {host['python']}. Times are those of"
        " data sheets with the assumed efficiencies (0.65 inside decoder layers, 0.5 inside encoder layers, 0.8 of"
        " links and memory). Nothing is calibrated on the papers' times, so ratios are comparable and absolute MFUs are"
        " not.",
        *_layers(layers),
        *_table_1(table),
        *_grids(grids),
        *_xl(*xl),
        *_scaling(scales),
    ]
    return "\n".join(lines) + "\n"


def _layers(layers: dict[int, float]) -> Iterator[str]:
    (few, of_few), (many, of_many) = layers.items()
    yield from (
        "",
        "## How many patches an image has",
        "",
        "PipeWeaver 8 says that an image is encoded into 169 patch tokens. Its 2.2 gives times: a layer of ViT 5B takes"
        " 6.75 ms for 8 images, a layer of the 32B backbone 10.5 ms for 8,192 tokens, a ratio of 0.643. The simulator"
        f" has {of_few:.3f} with {few} patches inside the encoder, and {of_many:.3f} with {many}, of which 16 become a"
        f" token. So 169 is what the backbone gets, and the models here have {many} patches an image. The shipped"
        " pipeweaver_vlm_s, _m and _l have 169, and with that an encoder that is far too cheap; VLM-M is changed for"
        " the grid below.",
    )


def _table_1(table: Table1) -> Iterator[str]:
    text, static, seconds = table.text, table.static, fmean(step.seconds for step in table.dynamic)
    mfu = fmean(step.mfu for step in table.dynamic)
    rows = (
        ("LM 7B", text.seconds, text.mfu, 1.0, 4.068, 0.400),
        ("ViT 2B + LM 5B, static", static.seconds, static.mfu, static.mfu / text.mfu, 4.567, 0.351),
        ("ViT 2B + LM 5B, dynamic", seconds, mfu, fmean(table.ratios), 6.789, 0.239),
    )
    yield from (
        "",
        "## PipeWeaver, Table 1: 8 H800, tp 2, pp 4, 12.8 PFLOPs a step",
        "",
        "| model | s | paper | MFU | paper | over LM | paper |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    )
    for name, own_s, own_mfu, ratio, paper_s, paper_mfu in rows:
        ours = f"{own_s:.3f} | {paper_s} | {own_mfu:.3f} | {paper_mfu:.3f} | {ratio:.3f}"
        yield f"| {name} | {ours} | {paper_mfu / 0.4:.3f} |"
    yield from (
        "",
        f"Stages have even parameters: {table.partition}. Drawn sequences have {table.images:.1f} images in the mean;"
        f" the costliest has {table.spread:.2f} times the work of the cheapest (paper: 4.15). The ratios of"
        f" {len(table.dynamic)} drawn steps lie between {min(table.ratios):.3f} and {max(table.ratios):.3f}.",
        "",
        "The paper gives neither shapes nor data of this table. Ours have about two images a sequence, since then even"
        " parameters are nearly even work; with twice the images the static ratio is"
        f" {table.denser.mfu / text.mfu:.3f}. So the static figure says little by itself."
        " What the data's variance adds is the dynamic figure. With 169 patches an image the two would be"
        f" {table.few_patches[0]:.3f} and {table.few_patches[1]:.3f}: an encoder that takes a few percent of a step"
        " idles its ranks, and the data's variance adds nothing.",
    )


def _grids(grids: Sequence[Grid]) -> Iterator[str]:
    yield from (
        "",
        "## PipeWeaver, figure 13: VLM-M on 64 H800",
        "",
        "MFU with the fastest memory settings that fit 92 % of 80 GB: strategy of all layers, and when gradients are"
        " summed. The paper's optimum is dp 8, tp 2, pp 4 with an MFU of 0.297.",
        "",
        "| dp, tp, pp |" + "".join(f" batch {grid.batch} | settings | GiB |" for grid in grids),
        "| --- |" + " --- | --- | --- |" * len(grids),
    )
    left = []
    for cells in zip(*(grid.cells for grid in grids), strict=True):
        degrees, row = cells[0].degrees, ""
        name = f"{degrees.dp}, {degrees.tp}, {degrees.pp}"
        if all(cell.step is None for cell in cells):
            left.append(name)
            continue
        for cell, grid in zip(cells, grids, strict=True):
            mark, step = "**" if cell is grid.best else "", cell.step
            nbytes = f"{step.peak_nbytes / _GIB:.0f}" if step is not None else "-"
            row += f" {mark}{cell.mfu:.3f}{mark} | {cell.words or 'nothing fits'} | {nbytes} |"
        yield f"| {name} |{row}"
    yield from ("", f"Nothing fits with dp, tp, pp of {'; '.join(left) or 'none'}.")
    for grid in grids:
        best, paper, free = grid.best, grid.of(Degrees(8, 4, 2)), grid.unlimited
        if paper is best:
            second = max((cell for cell in grid.cells if cell is not best), key=lambda cell: cell.mfu)
            found = f"as in the paper; the second, {second.degrees}, has {second.mfu / best.mfu:.1%} of it."
        else:
            share = f"{paper.mfu / best.mfu:.1%} of it" if paper.step else "does not fit"
            found = (
                f"the paper's has {share}. With gradients summed once a step, as in Megatron-LM, it would have"
                f" {free.mfu / best.mfu:.1%}, but needs {free.peak_nbytes / _GIB:.0f} GiB here."
            )
        yield f"Batch {grid.batch}: the best is {best.degrees}, {found}"
    yield from (
        "",
        "Norms and residuals are split by tokens (Megatron-LM's sequence parallelism), in the encoder too: with its"
        " hidden states whole on each rank of a tensor parallel group, the paper's optimum would take"
        f" {grids[0].whole.peak_nbytes / _GIB:.0f} GiB of 74.5 with gradients summed once a step. The paper gives"
        " no batch; bubbles depend on it. It cuts a microbatch's images into parts of twelve and limits memory while it"
        " schedules; 1F1B here runs all images of a microbatch at once, and keeps more of them.",
    )


def _xl(cell: Cell, seconds: float) -> Iterator[str]:
    assert cell.step is not None
    yield from (
        "",
        "## PipeWeaver, VLM-XL-16k: 16,384 H100",
        "",
        f"A step of {cell.degrees} with 32 sequences a replica, all 128 replicas different, is timed in {seconds:.1f} s"
        f" on one core, with the memory of every rank (target: 60 s). Its MFU is {cell.step.mfu:.3f} by 1F1B with full"
        f" recomputation and bubbles of {cell.step.bubble:.1%}; PipeWeaver's searched schedule reaches 0.36 in its own"
        f" simulation (figure 14). The fullest rank would hold {cell.step.peak_nbytes / 1e9:.0f} GB, and of an H100's"
        " 80 a plan takes 92 %: all images of a microbatch are in the encoder at once. So this plan is timed, but could"
        " not run as it is.",
    )


def _scaling(scales: Sequence[Scale]) -> Iterator[str]:
    modes = list(scales[-1].mfu)
    yield from (
        "",
        "## FlowTrain 4.4: VLM-32B over cluster sizes, 910B",
        "",
        "| devices |" + "".join(f" {mode} |" for mode in modes),
        "| --- |" + " --- |" * len(modes),
    )
    for scale in scales:
        yield f"| {scale.devices} |" + "".join(f" {scale.mfu[mode]:.1%} |" for mode in modes)
    gaps = {mode: 100 * fmean(each.mfu["llm_only"] - each.mfu[mode] for each in scales) for mode in modes}
    shown = ", ".join(f"{mode} {gaps[mode]:.1f}" for mode in modes if mode != "llm_only")
    yield from (
        "",
        f"Mean gap to `llm_only` in points: {shown}. The paper's: Megatron-LM (monolithic) 18.7, DistTrain"
        " (disaggregated) 12.1, FlowTrain (decoupled) 5.0; FlowTrain above 53 % everywhere.",
        "",
        "Each mode here has its own best degrees and settings, and the same kernels, packing and dispatch; the paper's"
        " baselines are other systems with their own. So gaps are smaller here, and what is left of them is what the"
        " mode itself costs. `decoupled` and `disaggregated` are equal, since the simulator's encoders work a step"
        " ahead and vary little. With 32 devices few splits match the encoder's share of the work.",
    )
