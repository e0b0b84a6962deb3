"""The spelling of places: globs, ports, parts, quoting, escapes, and what is malformed."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from models import named
from torch import nn

import hookline as hl
from hookline.places.grammar import escape, parse, parse_port

SPECIAL = "*{},/:[]#\\"


def row(count: int) -> nn.Sequential:
    return nn.Sequential(*[nn.Identity() for _ in range(count)])


def lettered_tree() -> nn.Sequential:
    """a and b, each with x and y, each of them with u and v."""
    model = nn.Sequential()
    for one in "ab":
        first = named()
        for two in "xy":
            first.add_module(two, named("u", "v"))
        model.add_module(one, first)
    return model


# -- globs ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("*", ["a", "b"]),
        ("*.x", ["a.x", "b.x"]),
        ("a.*", ["a.x", "a.y"]),
        ("*.*.u", ["a.x.u", "a.y.u", "b.x.u", "b.y.u"]),
        ("a.**", ["a.x", "a.x.u", "a.x.v", "a.y", "a.y.u", "a.y.v"]),
        ("**.u", ["a.x.u", "a.y.u", "b.x.u", "b.y.u"]),
        ("**.a", ["a"]),
        ("a.**.u", ["a.x.u", "a.y.u"]),
        ("**.x.**", ["a.x.u", "a.x.v", "b.x.u", "b.x.v"]),
        ("**.x.*", ["a.x.u", "a.x.v", "b.x.u", "b.x.v"]),
        ("{a,b}.x", ["a.x", "b.x"]),
        ("{a,b}.{x,y}.v", ["a.x.v", "a.y.v", "b.x.v", "b.y.v"]),
        ("{a.x,b.y}.u", ["a.x.u", "b.y.u"]),
        ("{a.{x,y},b.x}.u", ["a.x.u", "a.y.u", "b.x.u"]),
        ("{a.**,b}", ["a.x", "a.x.u", "a.x.v", "a.y", "a.y.u", "a.y.v", "b"]),
        ("{a}.x", ["a.x"]),
        ("{a,nothing}", ["a"]),
    ],
)
def test_a_glob_matches_these_modules_in_model_order(text, expected):
    assert hl.select(lettered_tree(), text) == expected


@pytest.mark.parametrize("text", ["**", "**.**", "**.*", "*.**", "{a.**,a,b,b.**}"])
def test_two_stars_match_at_any_depth_but_never_the_root(text):
    every = [name for name, _ in lettered_tree().named_modules() if name]
    expected = [name for name in every if "." in name] if text == "*.**" else every
    assert hl.select(lettered_tree(), text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{0..3}", ["0", "1", "2", "3"]),
        ("{3..1}", ["1", "2", "3"]),
        ("{9..11}", ["9", "10", "11"]),
        ("1{0..1}", ["10", "11"]),
        ("{{0..1},5,1{0..1}}", ["0", "1", "5", "10", "11"]),
        ("1*", ["1", "10", "11"]),
        ("*1", ["1", "11"]),
        ("{8..20}", ["8", "9", "10", "11"]),
        ("{,1}1", ["1", "11"]),
    ],
)
def test_ranges_are_inclusive_and_braces_nest(text, expected):
    assert hl.select(row(12), text) == expected


def test_ranges_keep_leading_zeros():
    model = named("layer01", "layer02", "layer1", "layer11")
    assert hl.select(model, "layer{01..10}") == ["layer01", "layer02"]


def test_a_star_stays_inside_one_segment_and_matches_nothing_too():
    model = named("conv", "conv1", "xconv")
    assert hl.select(model, "conv*") == ["conv", "conv1"]
    assert hl.select(model, "*conv*") == ["conv", "conv1", "xconv"]
    assert hl.select(lettered_tree(), "a*") == ["a"]


def test_a_glob_lets_regular_expression_characters_stand_for_themselves():
    model = named("a+b", "aab", "a(b)", "$", "a|b")
    assert hl.select(model, "a+*") == ["a+b"]
    assert hl.select(model, "{a|b,$}") == ["$", "a|b"]
    assert hl.select(model, "*)") == ["a(b)"]


# -- ports and parts ------------------------------------------------------------------------------

PORTS = ("output", "input", "inputs", "grad_output", "grad_input", "grad_inputs")


@pytest.mark.parametrize("port", PORTS)
def test_every_module_port_is_read_and_the_default_is_not_printed(port):
    (place,) = hl.select(row(1), f"0:{port}")
    assert place.port == port
    assert place == ("0" if port == "output" else f"0:{port}")


def test_the_ports_of_tensors_are_value_and_grad():
    model = nn.Sequential(nn.Linear(1, 1))
    assert hl.select(model, "0.weight:value") == ["0.weight"]
    assert hl.select(model, "0.weight:grad") == ["0.weight:grad"]


@pytest.mark.parametrize(
    ("spelled", "parts"),
    [
        ("[0]", (0,)),
        ("[-1]", (-1,)),
        ("[1][0]", (1, 0)),
        ("[mask]", ("mask",)),
        ("['0']", ("0",)),
        ('["0"]', ("0",)),
        ("['mask']", ("mask",)),
        ("['']", ("",)),
        ("[a b]", ("a b",)),
        ("[a.b]", ("a.b",)),
        ("[a:b][a/b][#]", ("a:b", "a/b", "#")),
        ("['a[0]']", ("a[0]",)),
        (r"['it\'s']", ("it's",)),
        (r"['a\\b']", ("a\\b",)),
        ("['-1']", ("-1",)),
        ("[--1]", ("--1",)),
        ("[²]", ("²",)),
        ("[1_000]", ("1_000",)),
    ],
)
def test_parts_are_positions_or_names(spelled, parts):
    pattern = parse(f"m:inputs{spelled}")
    assert pattern.parts == parts


def test_the_port_of_a_pair_is_spelled_the_same_way():
    assert parse_port(":inputs[mask]['0']") == ("inputs", ("mask", "0"))
    assert parse_port("[1][0]") == (None, (1, 0))
    with pytest.raises(hl.PlaceError, match="the second item of a pair is a port"):
        parse_port("fc:input")


def test_an_operation_is_understood():
    pattern = parse("h.*.attn/matmul#1:inputs[query]")
    assert (pattern.operation, pattern.nth, pattern.port) == ("matmul", 1, "inputs")
    (place,) = hl.select(lettered_tree(), "a.x/softmax")
    assert (place, place.path, place.operation) == ("a.x/softmax", "a.x", "softmax")


# -- what is malformed ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a..b", "empty segments"),
        (".a", "empty segments"),
        ("a.", "empty segments"),
        ("{a", "never closed"),
        ("a}", "closes no"),
        ("a[", r"square brackets do not pair up"),
        ("a[0", r"square brackets do not pair up"),
        ("a[]", r"is no part; write \[0\], \[name\] or \['0'\]"),
        ("a[0]b", "is no part"),
        ("a[0]:input", r"the port comes before the parts: a:input\[0\]"),
        ("a:input:grad_input", "more than one port"),
        ("a#1", "counts the uses of an operation"),
        ("a/x#b", "counts the uses of an operation"),
        ("a\\q", "a backslash escapes one of"),
        ("a\\", "ends in a backslash"),
        ("a**", "must stand alone"),
        ("**a", "must stand alone"),
        ("{0..100000}", "at most 10,000"),
        ("{a.b,c.d}" * 12, "stand for more than 1,000 paths"),
        ("{a}" * 3000, "more than 100 ports, parts and braces"),
        ("{" * 3000 + "a" + "}" * 3000, "more than 100 ports, parts and braces"),
        ("a" + "[" * 20_000, "more than 100 ports, parts and braces"),
        ("{0.." + "9" * 5000 + "}", "no empty segments"),
    ],
)
def test_a_malformed_place_is_repeated_with_the_reason_and_the_form(text, reason):
    with pytest.raises(hl.PlaceError, match=reason) as caught:
        hl.select(lettered_tree(), text)
    assert repr(text) in caught.value.asked
    assert caught.value.found
    assert caught.value.remedy.startswith("A place is path")


@pytest.mark.parametrize(("port", "close"), [("inptu", "input"), ("grad_ouput", "grad_output")])
def test_a_wrong_port_is_told_with_the_closest_one_and_all_there_are(port, close):
    with pytest.raises(hl.PlaceError, match=f"'{port}', which does not exist. Closest: '{close}'."):
        hl.select(lettered_tree(), f"a:{port}")
    with pytest.raises(hl.PlaceError, match=r"A module has output, input, .* value, grad"):
        hl.select(lettered_tree(), "a:")


@given(st.text(alphabet=SPECIAL + "ab.01'\" ", max_size=12))
@settings(max_examples=400, deadline=None)
def test_any_text_is_either_a_place_or_an_error_of_ours(text):
    model = named("a", "b", "a*", "0")
    try:
        found, told = hl.select(model, text), True
    except hl.HooklineError as error:
        found, told = [], bool(error.asked and error.remedy)
    assert told
    assert all(hl.select(model, place) == [place] for place in found)


# -- escapes and the round trip -------------------------------------------------------------------

HOSTILE = [
    "a/b", "x[0]", "{a}", "{a,b}", "*", "**", "a*", "a:b", "a:input", ":input", "#", "a#1",
    "\\", "\\*", "a\\b", ",", "[", "]", "[0]", "{", "}", " ", "a b", "ünï", "名前", "🙂", "\n",
    "\t", "'", '"', "a'b", "<script>", "-1", "0", "module", "weight:grad", "\ue02a", "\ue05c", "²",
]  # fmt: skip


@pytest.mark.parametrize("character", SPECIAL)
def test_a_backslash_escapes_every_special_character(character):
    model = named(f"a{character}b", "ab", "a", "b")
    assert escape(f"a{character}b") == f"a\\{character}b"
    (place,) = hl.select(model, f"a\\{character}b")
    assert place.path == f"a{character}b"
    assert place == f"a\\{character}b"


def test_an_escaped_character_can_stand_beside_a_wildcard():
    model = named("a*1", "a*2", "ab1", "{x}", "{y}")
    assert [place.path for place in hl.select(model, r"a\**")] == ["a*1", "a*2"]
    assert [place.path for place in hl.select(model, r"\{{x,y}\}")] == ["{x}", "{y}"]


@pytest.mark.parametrize("name", HOSTILE)
def test_a_printed_place_of_a_hostile_name_resolves_to_itself(name):
    model = named(name, "other")
    model.get_submodule(name).add_module(name, nn.Linear(1, 1))
    (place,) = hl.select(model, model.get_submodule(name))
    assert place.path == name
    for port in ("", ":input", ":grad_output", ":inputs[mask]", "[0]", "['0'][1]"):
        spelled = place + port
        assert hl.select(model, spelled) == [spelled]
    deep = f"{place}.{place}"
    assert hl.select(model, deep + ".weight", deep + ".bias:grad") == [
        deep + ".weight",
        deep + ".bias:grad",
    ]


@pytest.mark.parametrize("name", [name for name in HOSTILE if name not in ("**",)])
def test_a_hostile_name_is_accepted_as_it_is_when_it_has_one_reading(name):
    model = nn.Module()
    model.holder = named(name)
    (place,) = hl.select(model, "holder." + name)
    assert place.path == "holder." + name


def test_every_printed_place_of_a_hostile_model_resolves_to_itself():
    model = named(*HOSTILE)
    ports = [(nn.Identity, port) for port in (":output", ":input", ":grad_input[0]")]
    places = hl.select(model, *ports)
    assert len(places) == 3 * len(HOSTILE)
    for place in places:
        assert hl.select(model, place) == [place]


def segments():
    letters = st.sampled_from(SPECIAL + "a0. '\"é\n\ue02a").filter(lambda c: c != ".")
    return st.text(letters, min_size=1, max_size=6) | st.text(min_size=1, max_size=6).filter(
        lambda name: "." not in name
    )


parts = st.lists(st.integers(-3, 20) | st.text(max_size=5), max_size=3).map(tuple)


@given(st.lists(segments(), min_size=1, max_size=4, unique=True), parts, st.sampled_from(PORTS))
@settings(max_examples=200, deadline=None)
def test_every_place_that_is_printed_can_be_read_back(names, parts, port):
    model = named(*[name for name in names if not hasattr(nn.Sequential(), name)])
    for name, module in model.named_children():
        place = hl.Place(name, port, parts)
        assert hl.select(model, place) == [place]
        (found,) = hl.select(model, str(place))
        assert (found.path, found.port, found.parts) == (name, port, parts)
        assert hl.select(model, (module, f":{port}" + str(hl.Place("", "output", parts)))) == [
            place
        ]


# -- two readings ---------------------------------------------------------------------------------


def inner() -> nn.Sequential:
    """A model in which `{a.b,c}` is both a path and a glob."""
    model = named("c")
    model.add_module("{a", named("b,c}"))
    model.add_module("a", named("b"))
    return model


@pytest.mark.parametrize(
    ("model", "text", "grammar"),
    [
        (named("x[0]", "x"), "x[0]", ["x[0]"]),
        (named("a:input", "a"), "a:input", ["a:input"]),
        (named(":input"), ":input", [":input"]),
        (named("[0]"), "[0]", ["[0]"]),
        (named("*", "a"), "*", [r"\*", "a"]),
        (named("{a}", "a"), "{a}", ["a"]),
        (named("{a,b}", "a", "b"), "{a,b}", ["a", "b"]),
        (named("\\*", "*"), "\\*", [r"\*"]),
        (named("**", "a"), "**", [r"\*\*", "a"]),
        (named("a*", "ab"), "a*", [r"a\*", "ab"]),
        (inner(), "{a.b,c}", ["c", "a.b"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_two_readings_are_an_error_that_gives_a_spelling_for_each(model, text, grammar):
    with pytest.raises(hl.PlaceError, match="has two readings") as caught:
        hl.select(model, text)
    first, second = re.fullmatch(
        r"Write (.+) for the first, or (.+) for the second\.", caught.value.remedy
    ).groups()
    spelling = first[1:-1].replace("\\\\", "\\")
    (literal,) = hl.select(model, spelling)
    assert literal.path == text
    if second.startswith("(model, "):
        where = (model, second.removeprefix("(model, ")[1:-2].replace("\\\\", "\\"))
    else:
        where = second[1:-1].replace("\\\\", "\\")
    assert hl.select(model, where) == grammar


def test_one_reading_that_resolves_is_taken_without_a_word():
    assert hl.select(named("x[0]", "y"), "x[0]") == [r"x\[0\]"]
    assert hl.select(named("x", "y"), "x[0]") == ["x[0]"]
    assert hl.select(named("a:input", "b"), "a:input") == [r"a\:input"]
    assert hl.select(named("x[0]"), "x[0]:input[1]") == [r"x\[0\]:input[1]"]
    assert hl.select(named("x[0]"), "x[0][1]") == [r"x\[0\][1]"]
    assert hl.select(named("a/b"), "a/b:grad_output") == [r"a\/b:grad_output"]


# -- globs of a segment, against regular expressions ----------------------------------------------


def expression(glob: str) -> str:
    """The same as a regular expression."""
    return "".join({"*": ".*", "{": "(?:", "}": ")", ",": "|"}.get(c, c) for c in glob)


LETTERS = st.text("abc", max_size=3)
GLOBS = st.recursive(
    LETTERS | st.just("*"),
    lambda inner: (
        st.lists(inner, min_size=1, max_size=3).map("".join)
        | st.lists(inner, min_size=1, max_size=3).map(lambda choices: "{" + ",".join(choices) + "}")
    ),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(glob=GLOBS.filter(lambda glob: "**" not in glob), name=st.text("abc", max_size=6))
def test_stars_and_braces_mean_what_they_mean_in_a_regular_expression(glob, name):
    ((segment,),) = parse("x" + glob).paths
    found = segment == "x" + name if isinstance(segment, str) else segment.fullmatch("x" + name)
    assert found == bool(re.fullmatch(expression("x" + glob), "x" + name))


@pytest.mark.parametrize(
    "glob",
    [
        "*{}" * 90 + "z",
        "{,}" * 90 + "z",
        "{s,s}{e,e}{l,l}{f,f}" * 20,
        "{*,{*,{*,*}}}" * 30 + "z",
        "{*," * 100 + "z" + "}" * 100 + "z",
    ],
)
def test_no_glob_takes_long(glob):
    """A regular expression would go on for ever, and a place may come from a file."""
    model = named("self_attention" * 10)
    with pytest.raises(hl.PlaceNotFound, match="self_attention"):
        hl.select(model, glob)
