"""Build the small captioned-drawings data set under assets/openclipart from Debian's Open Clip Art packages.

    python assets/build_openclipart.py --deb-dir DIR

DIR holds openclipart-png_*.deb and openclipart-svg_*.deb; a missing one is fetched with `apt-get download`. The
pictures are the package's PNGs, made smaller; titles, descriptions and keywords are the RDF metadata of the matching
SVGs. The same input gives the same bytes, for one version each of Pillow and pyarrow.
"""

from __future__ import annotations

import argparse
import html
import io
import math
import random
import re
import struct
import subprocess
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageChops

SEED = 20
PACKAGES = ("openclipart-png", "openclipart-svg")
PUBLIC_DOMAIN = ("http://web.resource.org/cc/PublicDomain", "http://creativecommons.org/licenses/publicdomain/")
SCHEMA = pa.schema(
    [
        ("images", pa.list_(pa.struct([("bytes", pa.binary()), ("path", pa.string())]))),
        ("texts", pa.list_(pa.struct([("user", pa.string()), ("assistant", pa.string())]))),
    ]
)

# ---- which drawings are fit for use -------------------------------------------------------------------------------


def word_set(text: str, separator: str | None = None) -> set[str]:
    return set(text.split(separator))


LEFT_OUT_FOLDERS = (
    "shapes", "computer/icons", "computer/buttons", "computer/folders", "logos", "special", "buttons",
    "signs_and_symbols/led", "unsorted/duplicates", "tools/weapons", "people/clothing/pantyhose",
)  # fmt: skip
LEFT_OUT_WORDS = word_set(
    "nude naked sex sexy bra bikini thong thongs pantyhose condom nazi swastika hitler gallows wmd terror gun pistol "
    "rifle bomb marijuana cannabis suicide lynch logo icon icons iconset clipart "
    "cliparts openclipart email rollandin blueman graubner stripper chav ammo sunwheel "
    "grenade enthusiast done eris"
)
FOREIGN_WORDS = word_set(
    "de di del della dei il le les des du et une un el con da nella para com um uma y sul alla all issue sortie "
    "obligation obligatoire interdiction interdit sauvetage produit chimique lutte incendie danger glace "
    "casa vacca schermo esperimento colori cronometro finestra finestre sacco uccello macchina ruota motivo pescetto "
    "capitello demolizione passo scolapasta stambecco profilati tante cartella bitte abeille pasteque bobine mante "
    "couronne pansement gateau extincteur arbre simbolo stemma telefono cartes dossier charge rondelle"
)
COLLECTION_TITLES = word_set(
    "aiga symbol signs|map symbols|homes|australian maps|menu clip art collection example|contour chipmunk|baloon1|"
    "baloon|w cloud|road signs|svg road signs|various|etiquette|head|collection|advertising",
    "|",
)
NOISE_KEYWORDS = word_set("hash|unsorted|svg|png|clip art|clipart|openclipart|signs and symbols|icon|logo", "|")
NOISE_DESCRIPTION = re.compile(
    r"@|http|www\.|public domain|inkscape|licen[sc]e|released|convert|vectori|(created|made|drawn|design\w*) (by|with)|"
    r"feel free|clip ?art|svg|sodipodi|illustrator|this one|easi?ly? (to )?change|\bI\b|\bI'|\bmy\b|HASH|enjoy|logo|"
    r"trace|derived|based on|edited|architetto|overlay|abstract example|ideal for|openoffice|aproximation|made to|"
    r"composition",
    re.IGNORECASE,
)
PLAIN_TITLE = re.compile(r"[A-Za-z\u00c0-\u017f0-9 ,.'()&!?/:+-]{3,60}")
MAX_PER_TITLE = 3
MAX_PER_FOLDER = 60
MAX_PER_DESCRIPTION = 5
MAX_SOURCE_PIXELS = 12_000_000

# ---- wording ------------------------------------------------------------------------------------------------------

ASK_TITLE = (
    "What is this a picture of?", "Give this drawing a title.", "What does this picture show?", "What is this?",
    "Name what you see in the image.", "Which title fits this image?", "What do you see here?", "What is drawn here?",
    "Write a short caption.", "Caption this picture in a few words.", "How would you title this clip art?",
    "Please tell me what this image shows.", "Can you say what is pictured?", "In a few words, what is this drawing?",
)  # fmt: skip
ASK_KEYWORDS = (
    "Which keywords fit it?", "List some keywords for this drawing.", "Under which keywords would you file it?",
    "Give me tags for this picture.", "Which search terms should find this image?", "Add keywords, please.",
    "What tags would you put on it?",
)  # fmt: skip
ASK_DESCRIPTION = (
    "Describe it in more detail.", "Can you tell me more about it?", "How would you describe this picture?",
    "Please give a description.", "What else is there to say about this drawing?", "Describe the image.",
)  # fmt: skip
ASK_EITHER = (
    "Does this picture show {a} or {b}?", "Which is the better title: {a} or {b}?", "Is this {a}, or is it {b}?",
    "Choose the right caption: {a} / {b}.",
)  # fmt: skip
ASK_TAGGED = (
    'Is "{word}" one of the keywords of this drawing?', 'Would you find this picture under the keyword "{word}"?',
    'Is this image tagged "{word}"?',
)  # fmt: skip
ASK_WHICH = (
    "Which of these pictures shows {a}?", "Where do you see {a}?", "One of these images is called {a}. Which one?",
    "Find the drawing titled {a}.", "Which picture fits the title {a}?",
)  # fmt: skip
ASK_ALL = (
    "What do these pictures show?", "Name each of these drawings in order.", "Give a caption for every image.",
    "List the titles of these pictures, one after the other.", "What is in each picture?",
)  # fmt: skip
ASK_ALL_DETAIL = (
    "Catalogue these drawings: title, keywords and a description where there is one.",
    "Write an index card for each of these pictures.", "Describe all of these images as fully as you can.",
)  # fmt: skip
ASK_POSITION = ("What does the {nth} picture show?", "Give the {nth} image a title.", "And what is the {nth} one?")
TEXT_KEYWORDS = (
    "Which keywords fit a drawing called {a}?", "Suggest tags for a picture with the title {a}.",
    "A drawing is titled {a}. How should it be tagged?",
)  # fmt: skip
TEXT_TITLE = (
    "Give the title of a drawing tagged {words}.", "Which title could go with the keywords {words}?",
    "Name a picture that is filed under {words}.",
)  # fmt: skip
TEXT_DESCRIPTION = ("How is the drawing {a} described?", "Describe the picture called {a}.", "Tell me about {a}.")
TEXT_LIST = (
    'Name {n} drawings with the keyword "{word}".', 'List {n} titles filed under "{word}".',
    'Which pictures belong to the keyword "{word}"? Give {n}.',
)  # fmt: skip
TEXT_CARDS = (
    "Write the catalogue entries of these drawings: {titles}.", "What does the catalogue say about {titles}?",
    "Give titles, keywords and descriptions for {titles}.",
)  # fmt: skip
TEXT_SORT = (
    "Put these titles in alphabetical order: {titles}.", "Sort from A to Z: {titles}.",
    "In which order would a catalogue list these drawings? {titles}.",
)  # fmt: skip
ORDINALS = ("first", "second", "third", "fourth")
TEMPLATES = (
    *ASK_TITLE, *ASK_KEYWORDS, *ASK_DESCRIPTION, *ASK_EITHER, *ASK_TAGGED, *ASK_WHICH, *ASK_ALL, *ASK_ALL_DETAIL,
    *ASK_POSITION, *TEXT_KEYWORDS, *TEXT_TITLE, *TEXT_DESCRIPTION, *TEXT_LIST, *TEXT_CARDS, *TEXT_SORT,
    *(f"The {nth} one." for nth in ORDINALS),
)  # fmt: skip

Turns = list[tuple[str, str]]


@dataclass(frozen=True)
class Drawing:
    """One drawing: its place in the package and its metadata."""

    path: str
    title: str
    description: str
    keywords: tuple[str, ...]

    @property
    def folder(self) -> str:
        return "/".join(self.path.split("/")[:-1][:2])


@dataclass(frozen=True)
class Picture:
    """A drawing with its small encoded image."""

    drawing: Drawing
    data: bytes
    path: str
    size: tuple[int, int]


@dataclass(frozen=True)
class Sample:
    kind: str
    pictures: tuple[Picture, ...]
    turns: Turns


# ---- reading the packages -----------------------------------------------------------------------------------------


def find_deb(deb_dir: Path, package: str) -> Path:
    """The .deb of a package in deb_dir, downloaded there if it is missing."""
    if not list(deb_dir.glob(f"{package}_*.deb")):
        subprocess.run(["apt-get", "download", package], cwd=deb_dir, check=True)
    return max(deb_dir.glob(f"{package}_*.deb"))


def package_version(deb: Path) -> str:
    answer = subprocess.run(["dpkg-deb", "-f", str(deb), "Version"], check=True, capture_output=True, text=True)
    return answer.stdout.strip()


def clean(text: str | None) -> str:
    """Entities resolved, control characters dropped, white space collapsed."""
    plain = html.unescape(html.unescape(text or ""))
    return " ".join(re.sub(r"[\x00-\x1f\x7f-\x9f\ufffd]", " ", plain).split())


def words(text: str) -> list[str]:
    return re.findall(r"[^\W\d_]+", text.lower())


def clean_title(raw: str) -> str:
    """A title without the collection's prefix, author suffixes, underscores and running numbers."""
    if re.search(r"[\x7f-\x9f\ufffd]", html.unescape(raw)):
        return ""
    title = re.sub(r"^Clipart by .*? - ", "", clean(raw)).replace("_", " ")
    title = re.sub(r"([\s-]aj)?(\.svg)?$", "", title)
    title = re.sub(r"([a-z])([A-Z][a-z])", r"\1 \2", title)
    title = re.sub(r"\b([A-Za-z]{2,})\d+$", r"\1", title)
    title = re.sub(r"[\s#-]*\b\d{1,3}$", "", title)
    if " " not in title:
        title = title.replace("-", " ")
    title = " ".join(title.split()).strip(" -.,#:")
    return title[:1].upper() + title[1:]


def clean_description(raw: str, title: str, cap: int = 600) -> str:
    """A description cut at a sentence end, or '' when it only repeats the title or speaks of file and author."""
    text = clean(raw)
    found = words(text)
    if len(found) < 3 or set(found) <= {"a", "an", "the", *words(title)}:
        return ""
    if NOISE_DESCRIPTION.search(text) or FOREIGN_WORDS & set(found):
        return ""
    if len(text) > cap:
        head = text[:cap]
        ends = [match.end() for match in re.finditer(r"[.!?](?=\s)", head)]
        text = head[: ends[-1]] if ends else head.rsplit(" ", 1)[0]
    text = text[:1].upper() + text[1:]
    return text if text[-1] in ".!?\"')" else text + "."


def clean_keywords(raw: list[str]) -> tuple[str, ...]:
    kept: dict[str, None] = {}
    for item in raw:
        word = clean(item).replace("_", " ").lower()
        if re.fullmatch(r"[a-z][a-z' -]{1,19}", word) and word not in NOISE_KEYWORDS and not word.endswith("sym"):
            kept[word] = None
    return tuple(kept)[:12]


def is_fit(title: str, path: str, keywords: list[str]) -> bool:
    """Whether the title is a plain one that agrees with the file's name, in a subject we keep."""
    found = words(title)
    stem = re.sub(r"[^a-z]", "", Path(path).stem.lower())
    content = [w for w in found if len(w) > 2 and w not in ("the", "and", "with", "sign", "signs", "map", "svg")]
    if path.startswith(LEFT_OUT_FOLDERS) or "archite" in stem or "rollandin" in " ".join(keywords).lower():
        return False
    if not PLAIN_TITLE.fullmatch(title) or len(found) > 10 or title.lower() in COLLECTION_TITLES:
        return False
    if (LEFT_OUT_WORDS & set(words(" ".join([title, *keywords])))) or FOREIGN_WORDS & set(found):
        return False
    return any(w[:4] in stem for w in content)


def links_files(root: ET.Element) -> bool:
    """Whether the drawing links to image files; the package's PNGs show these as missing."""
    hrefs = (v for node in root.iter() if node.tag.endswith("}image") for k, v in node.attrib.items() if "href" in k)
    return any(not href.startswith("data:") for href in hrefs)


def read_drawing(svg: Path, path: str) -> Drawing | None:
    """The metadata of one drawing, or None when it is not in the public domain or not fit for use."""
    try:
        root = ET.parse(svg).getroot()
    except (ET.ParseError, OSError):
        return None
    work = next((node for node in root.iter() if node.tag.endswith("}Work")), None)
    if work is None or links_files(root):
        return None
    licences = [value for node in work if node.tag.endswith("}license") for value in node.attrib.values()]
    dc = "{http://purl.org/dc/elements/1.1/}"
    raw_keywords = [node.text or "" for node in work.iter() if node.tag.endswith("}li")]
    title = clean_title(work.findtext(dc + "title") or "")
    if not licences or licences[0] not in PUBLIC_DOMAIN or not is_fit(title, path, raw_keywords):
        return None
    description = clean_description(work.findtext(dc + "description") or "", title)
    return Drawing(path, title, description, clean_keywords(raw_keywords))


def png_size(png: Path) -> tuple[int, int]:
    with png.open("rb") as handle:
        return struct.unpack(">II", handle.read(24)[16:24])


def read_drawings(root: Path) -> list[Drawing]:
    """Every fit drawing under .../openclipart/{png,svg}, by path."""
    drawings = []
    for png in sorted((root / "png").rglob("*.png")):
        path = png.relative_to(root / "png").as_posix()
        svg = root / "svg" / Path(path).with_suffix(".svg")
        if png.is_symlink() or not svg.exists():
            continue
        width, height = png_size(png)
        if width * height > MAX_SOURCE_PIXELS or max(width, height) < 96 or not 0.25 <= width / height <= 4:
            continue
        drawing = read_drawing(svg, path)
        if drawing:
            drawings.append(drawing)
    return drawings


def spread(drawings: list[Drawing], rng: random.Random) -> list[Drawing]:
    """The drawings with a description, then the others, at random; limited per folder, title and description."""
    mixed = sorted(rng.sample(drawings, len(drawings)), key=lambda drawing: not drawing.description)
    limits = {"folder": MAX_PER_FOLDER, "title": MAX_PER_TITLE, "description": MAX_PER_DESCRIPTION}
    taken: Counter[tuple[str, str]] = Counter()
    kept = []
    for drawing in mixed:
        marks = [(name, str(getattr(drawing, name)).lower()) for name in limits if getattr(drawing, name)]
        if all(taken[mark] < limits[mark[0]] for mark in marks):
            taken.update(marks)
            kept.append(drawing)
    return kept


# ---- pictures -----------------------------------------------------------------------------------------------------


def on_white(png: Path) -> Image.Image:
    with Image.open(png) as source:
        rgba = source.convert("RGBA")
    canvas = Image.new("RGBA", rgba.size, "white")
    return Image.alpha_composite(canvas, rgba).convert("RGB")


def crop(image: Image.Image) -> Image.Image:
    """The image without its empty margins, except for a narrow rim."""
    box = ImageChops.difference(image, Image.new("RGB", image.size, "white")).getbbox()
    if box is None:
        return image
    rim = max(2, max(box[2] - box[0], box[3] - box[1]) // 25)
    left, top, right, bottom = box[0] - rim, box[1] - rim, box[2] + rim, box[3] + rim
    return image.crop((max(0, left), max(0, top), min(image.width, right), min(image.height, bottom)))


def shrink(image: Image.Image, rng: random.Random) -> Image.Image:
    """The image with its long side drawn from 96..320, never enlarged, its short side at least 32."""
    width, height = image.size
    scale = max(rng.randint(96, 320) / max(width, height), 32 / min(width, height))
    if scale >= 1:
        return image
    return image.resize((max(1, round(width * scale)), max(1, round(height * scale))), Image.Resampling.LANCZOS)


def encode(image: Image.Image, rng: random.Random, png_limit: int = 16_000) -> tuple[bytes, str]:
    """The image as a palette PNG or as a JPEG; the latter also where the PNG would be large."""
    quality = rng.choice((84, 90, 94))
    colours = rng.choice((64, 128, 256))
    if rng.random() < 0.6:
        out = io.BytesIO()
        image.quantize(colours, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
        if out.tell() <= png_limit:
            return out.getvalue(), ".png"
    out = io.BytesIO()
    image.save(out, "JPEG", quality=quality, optimize=True, progressive=rng.random() < 0.2)
    return out.getvalue(), ".jpg"


def look(image: Image.Image) -> bytes:
    """A coarse fingerprint: equal for copies of any size."""
    small = image.resize((8, 8), Image.Resampling.BOX)
    return bytes(value >> 5 for value in small.tobytes())


def make_picture(png: Path, drawing: Drawing, seen: set[bytes]) -> Picture | None:
    """The picture of a drawing, or None if it is (almost) blank, broken or a copy of an earlier picture."""
    rng = random.Random(f"{SEED}/{drawing.path}")
    try:
        image = crop(on_white(png))
    except (OSError, SyntaxError):
        return None
    mark = look(image)
    if mark in seen or len(set(mark)) < 3 or max(image.size) < 96 or max(image.size) > 5 * min(image.size):
        return None
    seen.add(mark)
    small = shrink(image, rng)
    data, suffix = encode(small, rng)
    return Picture(drawing, data, str(Path(drawing.path).with_suffix(suffix)), small.size)


def make_pictures(root: Path, drawings: list[Drawing], count: int) -> list[Picture]:
    seen: set[bytes] = set()
    pictures: list[Picture] = []
    for drawing in drawings:
        if len(pictures) == count:
            return pictures
        picture = make_picture(root / "png" / drawing.path, drawing, seen)
        if picture:
            pictures.append(picture)
    raise SystemExit(f"only {len(pictures)} fit pictures, {count} asked for")


# ---- samples ------------------------------------------------------------------------------------------------------


def quoted(title: str) -> str:
    return f'"{title}"'


def joined(keywords: tuple[str, ...]) -> str:
    return ", ".join(keywords)


def related(one: Drawing, other: Drawing) -> bool:
    """Whether the title of one might also fit the other."""
    about = {w[:4] for w in words(other.title)} | {w[:4] for k in other.keywords for w in words(k)}
    return any(w[:4] in about for w in words(one.title) if len(w) > 2)


def stranger(drawing: Drawing, pool: list[Picture], rng: random.Random) -> Drawing:
    while True:
        other = rng.choice(pool).drawing
        if not related(drawing, other) and not related(other, drawing):
            return other


def either_turn(drawing: Drawing, pool: list[Picture], rng: random.Random) -> tuple[str, str]:
    pair = [drawing.title, stranger(drawing, pool, rng).title]
    rng.shuffle(pair)
    question = rng.choice(ASK_EITHER).format(a=quoted(pair[0]), b=quoted(pair[1]))
    return question, drawing.title


def tagged_turn(drawing: Drawing, pool: list[Picture], rng: random.Random) -> tuple[str, str]:
    if rng.random() < 0.5:
        return rng.choice(ASK_TAGGED).format(word=rng.choice(drawing.keywords)), "Yes."
    other = stranger(drawing, pool, rng)
    strange = [word for word in other.keywords if word not in drawing.keywords]
    if not strange:
        return rng.choice(ASK_TAGGED).format(word=rng.choice(drawing.keywords)), "Yes."
    return rng.choice(ASK_TAGGED).format(word=rng.choice(strange)), "No."


def single_turns(drawing: Drawing, pool: list[Picture], rng: random.Random) -> Turns:
    """A conversation on one picture: mostly the title first, then the rest of the metadata."""
    turns = [either_turn(drawing, pool, rng) if rng.random() < 0.1 else (rng.choice(ASK_TITLE), drawing.title)]
    if drawing.keywords and rng.random() < 0.15:
        turns.append(tagged_turn(drawing, pool, rng))
    if len(drawing.keywords) > 1 and rng.random() < 0.4:
        turns.append((rng.choice(ASK_KEYWORDS), joined(drawing.keywords)))
    if drawing.description and rng.random() < 0.8:
        turns.append((rng.choice(ASK_DESCRIPTION), drawing.description))
    return turns


def card(drawing: Drawing) -> str:
    """All that is known of a drawing, in one line."""
    parts = [f"{drawing.title}."]
    if drawing.keywords:
        parts.append(f"Keywords: {joined(drawing.keywords)}.")
    return " ".join([*parts, drawing.description]).strip()


def multi_turns(drawings: list[Drawing], rng: random.Random) -> Turns:
    """A conversation on several pictures, whose titles do not fit one another."""
    nth = rng.randrange(len(drawings))
    kind = rng.random()
    if kind < 0.4:
        turns = [(rng.choice(ASK_WHICH).format(a=quoted(drawings[nth].title)), f"The {ORDINALS[nth]} one.")]
    elif kind < 0.75:
        named = "; ".join(f"{where}: {drawing.title}" for where, drawing in zip(ORDINALS, drawings, strict=False))
        turns = [(rng.choice(ASK_ALL), named[:1].upper() + named[1:])]
    else:
        lines = [f"{number}. {card(drawing)}" for number, drawing in enumerate(drawings, 1)]
        turns = [(rng.choice(ASK_ALL_DETAIL), "\n".join(lines))]
    if rng.random() < 0.3:
        nth = rng.randrange(len(drawings))
        turns.append((rng.choice(ASK_POSITION).format(nth=ORDINALS[nth]), drawings[nth].title))
    return turns


def list_turn(pool: list[Picture], rng: random.Random) -> tuple[str, str]:
    """A list of titles that carry one keyword; its length is log-normal."""
    by_word: dict[str, dict[str, None]] = defaultdict(dict)
    for picture in pool:
        for word in picture.drawing.keywords:
            by_word[word][picture.drawing.title] = None
    word = rng.choice([word for word, titles in by_word.items() if len(titles) > 2])
    titles = list(by_word[word])
    count = max(2, min(len(titles), 60, round(math.exp(rng.gauss(2.2, 0.9)))))
    return rng.choice(TEXT_LIST).format(n=count, word=word), "; ".join(rng.sample(titles, count)) + "."


def sort_turn(pool: list[Picture], rng: random.Random) -> tuple[str, str]:
    count = max(3, min(40, round(math.exp(rng.gauss(1.8, 0.7)))))
    titles = list(dict.fromkeys(picture.drawing.title for picture in rng.sample(pool, min(count, len(pool)))))
    ordered = sorted(titles, key=lambda title: (title.lower(), title))
    return rng.choice(TEXT_SORT).format(titles="; ".join(titles)), "; ".join(ordered) + "."


def cards_turn(pool: list[Picture], rng: random.Random) -> tuple[str, str]:
    """The catalogue entries of several drawings; their number is log-normal."""
    count = max(2, min(16, round(math.exp(rng.gauss(1.5, 0.7)))))
    by_title = {p.drawing.title: p.drawing for p in rng.sample(pool, count) if p.drawing.keywords}
    titles = "; ".join(quoted(title) for title in by_title) or quoted(pool[0].drawing.title)
    entries = [card(drawing) for drawing in by_title.values()] or [card(pool[0].drawing)]
    return rng.choice(TEXT_CARDS).format(titles=titles), "\n".join(entries)


def text_turns(pool: list[Picture], rng: random.Random) -> Turns:
    """A question without a picture, on titles, keywords and descriptions alone."""
    kind = rng.random()
    if kind < 0.2:
        return [list_turn(pool, rng)]
    if kind < 0.35:
        return [sort_turn(pool, rng)]
    if kind < 0.5:
        return [cards_turn(pool, rng)]
    drawing = rng.choice([p.drawing for p in pool if len(p.drawing.keywords) > 1])
    if kind < 0.7:
        turns = [(rng.choice(TEXT_KEYWORDS).format(a=quoted(drawing.title)), joined(drawing.keywords))]
    else:
        turns = [(rng.choice(TEXT_TITLE).format(words=joined(drawing.keywords)), drawing.title)]
    if drawing.description:
        turns.append((rng.choice(TEXT_DESCRIPTION).format(a=quoted(drawing.title)), drawing.description))
    return turns


def unlike(count: int, queue: Iterator[Picture]) -> list[Picture]:
    """The next pictures of the queue whose titles do not fit one another."""
    chosen: list[Picture] = []
    while len(chosen) < count:
        new = next(queue)
        if not any(related(new.drawing, p.drawing) or related(p.drawing, new.drawing) for p in chosen):
            chosen.append(new)
    return chosen


def forever(pool: list[Picture], rng: random.Random) -> Iterator[Picture]:
    """The whole pool again and again, each time in another order."""
    while True:
        yield from rng.sample(pool, len(pool))


def make_samples(pool: list[Picture], singles: int, multis: int, texts: int, rng: random.Random) -> list[Sample]:
    """Singles take the first pictures, one each; multi-image samples take the others first, then any."""
    samples = [Sample("single-image", (p,), single_turns(p.drawing, pool, rng)) for p in pool[:singles]]

    def rest() -> Iterator[Picture]:
        yield from pool[singles:]
        yield from forever(pool, rng)

    queue = rest()
    for _ in range(multis):
        pictures = unlike(rng.choice((2, 2, 3, 3, 4)), queue)
        samples.append(Sample("multi-image", tuple(pictures), multi_turns([p.drawing for p in pictures], rng)))
    samples += [Sample("text-only", (), text_turns(pool, rng)) for _ in range(texts)]
    rng.shuffle(samples)
    return samples


# ---- writing ------------------------------------------------------------------------------------------------------


def write_parquet(samples: list[Sample], target: Path) -> None:
    rows = [
        {
            "images": [{"bytes": p.data, "path": p.path} for p in sample.pictures],
            "texts": [{"user": user, "assistant": assistant} for user, assistant in sample.turns],
        }
        for sample in samples
    ]
    table = pa.Table.from_pylist(rows, schema=SCHEMA)
    pq.write_table(table, target, row_group_size=64, compression="zstd")


def quantiles(values: list[int], label: Callable[[int], str] = str) -> str:
    ordered = sorted(values)
    picks = [ordered[round(q * (len(ordered) - 1))] for q in (0, 0.1, 0.5, 0.9, 1)]
    return " / ".join(label(value) for value in picks)


def table_rows(name: str, samples: list[Sample], size: int) -> str:
    """One line of the README's table of counts."""
    kinds = Counter(sample.kind for sample in samples)
    distinct = {p.path for sample in samples for p in sample.pictures}
    placed = sum(len(sample.pictures) for sample in samples)
    several = sum(len(sample.turns) > 1 for sample in samples)
    return (
        f"| `{name}.parquet` | {len(samples)} | {kinds['single-image']} | {kinds['multi-image']} | "
        f"{kinds['text-only']} | {several} | {len(distinct)} | {placed} | {size / 1e6:.2f} MB |"
    )


def size_rows(name: str, samples: list[Sample]) -> list[str]:
    pictures = list({p.path: p for sample in samples for p in sample.pictures}.values())
    lengths = [len(" ".join(part for turn in s.turns for part in turn).split()) for s in samples]
    jpegs = sum(p.path.endswith(".jpg") for p in pictures)
    shapes = Counter("portrait" if p.size[0] < p.size[1] else "landscape" for p in pictures if p.size[0] != p.size[1])
    square = len(pictures) - sum(shapes.values())
    return [
        f"| {name}: long side, pixels | {quantiles([max(p.size) for p in pictures])} |",
        f"| {name}: short side, pixels | {quantiles([min(p.size) for p in pictures])} |",
        f"| {name}: width / height | {quantiles([round(100 * p.size[0] / p.size[1]) for p in pictures], percent)} |",
        f"| {name}: encoded bytes | {quantiles([len(p.data) for p in pictures])} |",
        f"| {name}: words in a sample | {quantiles(lengths)} |",
        f"| {name}: JPEG / PNG | {jpegs} / {len(pictures) - jpegs} |",
        f"| {name}: landscape / portrait / square | {shapes['landscape']} / {shapes['portrait']} / {square} |",
    ]


def percent(value: int) -> str:
    return f"{value / 100:.2f}"


def readme(splits: dict[str, list[Sample]], sizes: dict[str, int], versions: dict[str, str]) -> str:
    counts = "\n".join(table_rows(name, samples, sizes[name]) for name, samples in splits.items())
    spreads = "\n".join(row for name, samples in splits.items() for row in size_rows(name, samples))
    packages = " and ".join(f"`{name}` {version}" for name, version in versions.items())
    return f"""# openclipart: a small real image-text data set

Drawings from the Open Clip Art Library with questions and answers made from their own metadata. It is small enough to
be kept in the repository, so that training, evaluation and the tests have real pictures without a download.

* Origin: Debian's packages {packages}
  (the Open Clip Art Library 0.18).
* Licence: dedicated to the public domain by the drawings' authors (the Creative Commons public domain dedication, for
  which CC0 has since taken over). A drawing whose SVG does not say so is left out.
* Pictures: the package's PNGs on white, cropped and made smaller (long side drawn from 96 to 320 pixels, never
  enlarged), stored as palette PNGs or as JPEGs. No picture is both in train and in eval; copies are left out by a
  coarse fingerprint. A title can occur in both, with different pictures.
* Texts: the answers are titles, keywords and descriptions from the SVG's RDF metadata, or the order of the pictures.
  Titles are tidied (underscores, running numbers) and a title which does not agree with the file's name is left out.
* Left out: shapes, icon themes, buttons, logos, weapons, and titles of a whole collection; at most
  {MAX_PER_FOLDER} drawings of one folder and {MAX_PER_TITLE} of one title are taken.

## Schema

As in the Cauldron and FineVision: `images` is a list of structs (`bytes`, `path`), `texts` a list of structs (`user`,
`assistant`), a turn each. There are no image placeholders in the texts: the images come before the first user turn. A
text-only sample has an empty `images` list. Row groups hold 64 samples.

## Counts

| file | samples | single-image | multi-image | text-only | multi-turn | distinct images | image places | size |
|---|---|---|---|---|---|---|---|---|
{counts}

| least / 10 % / median / 90 % / most | |
|---|---|
{spreads}

## Rebuild

    python assets/build_openclipart.py --deb-dir DIR

`DIR` holds the two packages; those missing are fetched with `apt-get download`. The same packages, Pillow and pyarrow
give the same bytes.
"""


def build(root: Path, out: Path, versions: dict[str, str]) -> str:
    """Both splits and the README, from the unpacked packages."""
    rng = random.Random(SEED)
    drawings = spread(read_drawings(root), rng)
    pictures = make_pictures(root, drawings, 64 + 1100)
    rng.shuffle(pictures)
    splits = {
        "train": make_samples(pictures[64:], 780, 160, 110, rng),
        "eval": make_samples(pictures[:64], 44, 8, 6, rng),
    }
    out.mkdir(parents=True, exist_ok=True)
    sizes = {}
    for name, samples in splits.items():
        write_parquet(samples, out / f"{name}.parquet")
        sizes[name] = (out / f"{name}.parquet").stat().st_size
    text = readme(splits, sizes, versions)
    (out / "README.md").write_text(text, encoding="utf-8")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--deb-dir", type=Path, required=True, help="folder with the two .deb files")
    default = Path(__file__).resolve().parent.parent / "assets" / "openclipart"
    parser.add_argument("--out", type=Path, default=default, help="folder for the data set")
    args = parser.parse_args()
    debs = [find_deb(args.deb_dir, package) for package in PACKAGES]
    with tempfile.TemporaryDirectory() as scratch:
        for deb in debs:
            subprocess.run(["dpkg-deb", "-x", str(deb), scratch], check=True)
        versions = {package: package_version(deb) for package, deb in zip(PACKAGES, debs, strict=True)}
        print(build(Path(scratch) / "usr" / "share" / "openclipart", args.out, versions))


if __name__ == "__main__":
    main()
