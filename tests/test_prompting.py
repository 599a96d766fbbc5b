"""The study of templates: the same questions in other ways, each as a server would put them, paired with those of training."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
from conftest import CHATML, make_tokenizer, tiny_run

from headwright.configs import UserError
from headwright.configs.schema import Source, TemplateConfig
from headwright.data.chat import Renderer
from headwright.data.corpus import Document
from headwright.data.harvest import harvest
from headwright.eval.prompting import TRAINED, Way, asked_so, chats_of, gain_of, template_rows, template_says, ways
from headwright.eval.scene import Scene
from headwright.train.run import train

CHAT = Document("key", "some", "place", 1, ({"role": "user", "content": "count to 3"},))
BARE = "without the chats' system prompt"
THINKS = CHATML + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"


def said(way: Way, document: Document = CHAT, template: str = CHATML, **options) -> str:
    """A prompt as text."""
    tokenizer = make_tokenizer(template)
    return tokenizer.decode(way.ids(document, Renderer(tokenizer, options=options)))


def test_each_way_puts_the_question_as_a_server_would():
    trained = said(Way(TRAINED))
    assert trained.startswith("<|im_start|>user\ncount to 3")
    assert said(Way("brief", system="Be brief.")) == f"<|im_start|>system\nBe brief.<|im_end|>\n{trained}"
    assert said(Way("empty", system="")).startswith("<|im_start|>system\n<|im_end|>")
    assert said(Way("raw", raw=True)) == "count to 3"
    own = replace(CHAT, messages=({"role": "system", "content": "Be long."}, *CHAT.messages))
    assert said(Way("brief", system="Be brief."), own) == said(Way("brief", system="Be brief."))
    assert said(Way(BARE, bare=True), own) == trained


def test_a_template_that_refuses_a_way(scene, capsys):
    """What was not asked for is left out; what was, is an error."""
    pairs, template = (
        chats_of(scene),
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}",
    )
    refusing = Renderer(make_tokenizer(template + CHATML))
    assert asked_so(Way("empty", system=""), pairs, refusing) is None
    assert "left out: empty: the chat template refuses" in capsys.readouterr().out
    with pytest.raises(UserError, match="study template, mine: the chat template refuses"):
        asked_so(Way("mine", system="", asked=True), pairs, refusing)


def test_arguments_are_added_to_those_of_training():
    assert said(Way("off", arguments={"enable_thinking": False}), template=THINKS).endswith("<think></think>")
    assert said(Way(TRAINED), template=THINKS, enable_thinking=False).endswith("<think></think>")
    assert not said(Way("on", arguments={"enable_thinking": True}), template=THINKS, enable_thinking=False).endswith(
        ">>"
    )


def test_another_template(tmp_path):
    path = tmp_path / "other.jinja"
    path.write_text("{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}{% endfor %}", encoding="utf-8")
    assert said(Way("other", file=str(path))) == "[user] count to 3"
    with pytest.raises(UserError, match=r"study\.templates: .*none"):
        said(Way("other", file=str(tmp_path / "none")))


def test_what_is_tried_without_being_asked():
    """Thinking is switched only where the template knows it."""
    names = [way.name for way in ways([], Renderer(make_tokenizer()))]
    assert names == [TRAINED, BARE, "another system prompt", "an empty system prompt", "no template"]
    assert ways([], Renderer(make_tokenizer(THINKS)))[1] == Way("thinking off", arguments={"enable_thinking": False})
    off = Renderer(make_tokenizer(THINKS), options={"enable_thinking": False})
    assert ways([], off)[1] == Way("thinking on", arguments={"enable_thinking": True})
    asked = [TemplateConfig("mine", system="Be brief.")]
    assert ways(asked, off) == [Way(TRAINED), Way("mine", system="Be brief.", asked=True)]


@pytest.fixture(scope="module")
def scene(model_dir, chats, tmp_path_factory) -> Scene:
    """A trained run, opened."""
    study = {"prompts": 4, "max_new_tokens": 6, "depth": 2}
    run = tiny_run(model_dir, chats, tmp_path_factory.mktemp("runs"), study=study)
    harvest(run)
    train(run)
    return Scene.open(run)


def test_the_way_of_training_is_the_harvests(scene):
    renderer = scene.room.renderer
    assert len(chats_of(scene)) == len(scene.prompts) > 0
    assert all(Way(TRAINED).ids(document, renderer) == prompt.ids for prompt, document in chats_of(scene))


def test_rows_are_paired_with_those_of_training(scene):
    scene.begin("template")
    rows = template_rows(scene)
    first, *others = rows
    assert first["way"] == TRAINED
    assert first["tau_gain"] == 0
    assert [row["way"] for row in others] == ["another system prompt", "an empty system prompt", "no template"]
    for row in others:
        assert row["tau_gain"] == pytest.approx(row["tau"] - first["tau"])
        assert row["tau_gain_ci95"][0] <= row["tau_gain"] <= row["tau_gain_ci95"][1]
    assert others[0]["prompt_tokens"] > first["prompt_tokens"] > others[2]["prompt_tokens"]
    assert template_says(rows).startswith(f"τ {first['tau']:.2f} as trained; another system prompt ")


def test_a_way_that_changes_nothing_is_left_out(scene):
    """A template that takes no notice of an argument."""
    asked = [
        TemplateConfig("thinking", template={"enable_thinking": True}),
        TemplateConfig("brief", system="Be brief."),
    ]
    other = replace(scene, run=replace(scene.run, study=replace(scene.run.study, templates=asked)))
    other.begin("template")
    assert [row["way"] for row in template_rows(other)] == [TRAINED, "brief"]


def test_plain_text_has_no_template(scene, tmp_path):
    path = tmp_path / "plain.txt"
    path.write_text(" ".join(f"word{number}" for number in range(4000)), encoding="utf-8")
    corpus = replace(scene.run.corpus, sources=[Source(path=str(path), words=4)], held_out=0.5)
    with pytest.raises(UserError, match="no held-out prompt is a chat"):
        chats_of(replace(scene, run=replace(scene.run, corpus=corpus)))


def test_gains_are_of_all_cycles():
    before, now = (SimpleNamespace(emitted=emitted) for emitted in ([1, 1], [3, 3, 2]))
    assert gain_of([(before, now)]) == pytest.approx(8 / 3 - 1)
