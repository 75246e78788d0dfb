from hypothesis import given
from hypothesis import strategies as st

from services.env.environments.games.actions import ActionProtocol, Reply

NAMES = ("Left", "Down", "Right", "Up")
ANSWER = ActionProtocol(NAMES, "answer", 5)
PLAIN = ActionProtocol(NAMES, "plain", 5)
actions = st.lists(st.sampled_from(NAMES), min_size=1, max_size=5).map(tuple)


@given(actions)
def test_what_is_written_is_read_back(wanted: tuple[str, ...]) -> None:
    for protocol in (ANSWER, PLAIN):
        assert protocol.read(protocol.write(wanted)) == Reply(wanted)


@given(
    actions,
    st.text(alphabet=st.characters(exclude_characters="<>")),
    st.text(alphabet=st.characters(exclude_characters="<>")),
)
def test_words_around_the_tag_do_not_matter(wanted: tuple[str, ...], before: str, after: str) -> None:
    assert ANSWER.read(before + ANSWER.write(wanted) + after) == Reply(wanted)


@given(st.text())
def test_any_text_is_readable(text: str) -> None:
    for protocol in (ANSWER, PLAIN):
        reply = protocol.read(text)
        assert set(reply.actions) <= set(NAMES)
        assert len(reply.actions) <= 5
        assert reply.actions or reply.fault


def test_case_and_space_do_not_matter() -> None:
    assert ANSWER.read("<Answer>\n right||DOWN ||  up\n</ANSWER>") == Reply(("Right", "Down", "Up"))
    assert PLAIN.read("right, DOWN || up\n") == Reply(("Right", "Down", "Up"))


def test_the_last_closed_answer_counts() -> None:
    assert ANSWER.read("<answer>Up</answer> no: <answer>Left</answer> <answer>Right").actions == ("Left",)
    assert ANSWER.read("<answer> <answer>Down</answer>").actions == ("Down",)


def test_unknown_names_are_dropped_and_malformed() -> None:
    assert ANSWER.read("<answer>Up || Jump || Down</answer>") == Reply(("Up", "Down"), "invalid_action")
    assert ANSWER.read("<answer>Jump</answer>") == Reply((), "invalid_action")


def test_no_answer_is_malformed() -> None:
    for text in ("", "Up", "<answer></answer>", "<answer>||</answer>", "</answer>Up<answer>"):
        assert ANSWER.read(text) == Reply((), "format")


def test_more_actions_than_a_turn_has_are_cut() -> None:
    assert ANSWER.read(ANSWER.write(["Up"] * 7)) == Reply(("Up",) * 5)


def test_reading_takes_linear_time() -> None:
    assert ANSWER.read("<answer>" * 100_000) == Reply((), "format")
