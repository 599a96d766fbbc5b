"""The Debian Administrator's Handbook, in any of its languages, out of Debian's package: prose of a technical manual.

GPL-2+ or CC-BY-SA-3.0, by Raphaël Hertzog, Roland Mas, Freexian and translators. Read in place; nothing of it is shipped.
"""

import io
import tarfile
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path, PurePosixPath

from headwright.configs import UserError
from headwright.data.packages import fetch_debian
from headwright.data.scripts import script_of

PACKAGE = "debian-handbook"
LICENCE = "GPL-2+ or CC-BY-SA-3.0"
LANGUAGES = {
    "handbook-en": ("en-US", "Latin"),
    "handbook-ru": ("ru-RU", "Cyrillic"),
}  # the folder; what is in another script is not translated
SHORTEST = 60  # characters of a paragraph; shorter ones are captions
PIECE = 600  # characters that a text has at least: paragraphs that follow one another
OPENS = b"!<arch>\n"
HEADER = 60  # bytes before each member of an ar archive
BLOCKS = {"div", "ul", "ol", "dl", "table", "pre", "h1", "h2", "h3", "h4", "h5"}


def handbook_rows(name: str) -> Iterator[tuple[str, dict[str, str]]]:
    """(place, {"text": …}) of one language, chapter by chapter."""
    folder, script = LANGUAGES[name]
    seen: set[str] = set()  # chapters stand in the package whole and by section
    for chapter, page in pages(fetch_debian(PACKAGE), folder):
        fresh = [text for text in paragraphs(page) if text not in seen and script_of(text) == script]
        seen.update(fresh)
        for number, text in enumerate(texts(fresh)):
            yield f"{chapter}[{number}]", {"text": text}


def texts(found: list[str]) -> Iterator[str]:
    """Paragraphs in a row, as many as make a text. A short rest joins none."""
    held: list[str] = []
    for paragraph in found:
        held.append(paragraph)
        if sum(map(len, held)) >= PIECE:
            yield "\n\n".join(held)
            held = []


def paragraphs(page: str) -> list[str]:
    """The paragraphs of a page, without captions."""
    reader = Paragraphs()
    reader.feed(page)
    reader.close()
    return [text for text in reader.found if len(text) >= SHORTEST]


class Paragraphs(HTMLParser):
    """Collects the text of <div class="para">, up to the next block."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.held: list[str] | None = None

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """A block ends what was open; a paragraph begins."""
        if tag in BLOCKS:
            self.end()
        if tag == "div" and dict(attrs).get("class") == "para":
            self.held = []

    def handle_endtag(self, tag: str) -> None:
        """A block ends."""
        if tag in BLOCKS:
            self.end()

    def handle_data(self, data: str) -> None:
        """Its words."""
        if self.held is not None:
            self.held.append(data)

    def end(self) -> None:
        """Keep what was open."""
        if self.held is not None:
            self.found.append(" ".join("".join(self.held).split()))
        self.held = None


def pages(package: Path, language: str) -> Iterator[tuple[str, str]]:
    """(name, HTML) of the handbook's pages in one language, by name."""
    found = {}
    try:
        with tarfile.open(fileobj=io.BytesIO(data_of(package)), mode="r:*") as archive:
            for member in archive:
                path = PurePosixPath(member.name)
                file = archive.extractfile(member) if path.suffix == ".html" and path.parent.name == language else None
                if file is not None:
                    found[path.name] = file.read().decode("utf-8", "replace")
    except (tarfile.TarError, OSError, EOFError) as error:
        raise UserError(f"{package}: not a Debian package that can be read ({error}): delete it") from None
    if not found:
        raise UserError(f"{package}: no handbook of {language} in it")
    yield from sorted(found.items())


def data_of(package: Path) -> bytes:
    """The member data.tar.* of a Debian package, which is an ar archive. Raises UserError."""
    blob = package.read_bytes()
    place = len(OPENS)
    while blob.startswith(OPENS) and place + HEADER <= len(blob):
        header = blob[place : place + HEADER]
        name, size = header[:16].decode("ascii", "replace").strip(), header[48:58].strip()
        if not size.isdigit():
            break
        start = place + HEADER
        if name.startswith("data.tar"):
            return blob[start : start + int(size)]
        place = start + int(size) + int(size) % 2
    raise UserError(f"{package}: not a Debian package: delete it")
