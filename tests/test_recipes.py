"""Recipes: what they do on a model, and what comes back from a folder."""

import json
import re

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from models import small
from oracles import assert_clean, assert_same_state, rewrite_json, state_bits
from torch import nn

import hookline as hl
from hookline.edits.changes import Broadcasting
from hookline.recipes import json_format

X = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))


def doubled(value):
    return value * 2


def by_call(value, call):
    return value + call.index


VECTOR = torch.tensor([1.0, -2.0, 3.0, 0.5])
READY = {
    "replace": hl.replace(VECTOR),
    "add": hl.add(VECTOR),
    "add a number": hl.add(0.25),
    "scale": hl.scale(3),
    "noise": hl.noise(0.1, relative=True, seed=3),
    "zero": hl.zero(),
    "clamp": hl.clamp(min=0.3, max=float("inf")),
    "dropout": hl.dropout(0.5, training=True, seed=1),
    "blend": hl.blend(VECTOR, amount=torch.tensor([0.0, 0.5, 1.0, 0.1])),
    "remove_direction": hl.remove_direction(VECTOR.to(torch.bfloat16)),
    "dim": hl.add(torch.arange(5.0), dim=0) | hl.blend(VECTOR, 0.5, dim=-1),
    "dim of bounds": hl.clamp(-VECTOR.abs(), VECTOR.abs(), dim=1) | hl.scale(VECTOR, dim=1),
    "chain": hl.scale(2.0) | hl.add(VECTOR) | hl.clamp(max=0.5),
}


@pytest.mark.parametrize("name", READY)
def test_a_saved_change_does_what_it_did_before(name, model, tmp_path):
    with hl.edit(model, "0", READY[name]):
        expected = model(X)
    hl.Recipe([("0", READY[name])]).save(tmp_path)
    with hl.Recipe.load(tmp_path).on(model):
        assert torch.equal(model(X), expected)
    assert not torch.equal(model(X), expected)
    assert_clean(model)


def test_every_ready_change_but_patch_can_be_saved():
    homes = ("hookline.edits.changes", "hookline.edits.ready_changes")
    kinds = [*hl.Change.__subclasses__(), *Broadcasting.__subclasses__()]
    ready = {kind.__name__ for kind in kinds if kind.__module__ in homes}
    assert ready - {"patch", "Chain", "Broadcasting"} == set(json_format._READY)


def test_entries_apply_in_order_as_stacked_edits_do(model):
    first, second = hl.add(VECTOR), hl.scale(torch.tensor([2.0, 0.0, -1.0, 1.0]))
    for recipe in (
        hl.Recipe([("0", first), ("0", second)]),
        hl.Recipe([("0", first)]) + hl.Recipe([("0", second)]),
    ):
        with hl.edit(model, {"0": first}), hl.edit(model, {"0": second}):
            expected = model(X)
        with recipe.on(model):
            assert torch.equal(model(X), expected)


def test_gradients_and_parameters_are_changed_and_put_back(model, tmp_path):
    entries = {"0:grad_output": hl.scale(0.5), "2.weight": hl.zero(), "1": hl.add(1.0)}
    with hl.edit(model, entries):
        loss = model(X).sum()
        loss.backward()
    expected = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    hl.Recipe(entries.items()).save(tmp_path)
    before = state_bits(model)
    with hl.Recipe.load(tmp_path).on(model):
        assert not model[2].weight.any()
        assert torch.equal(model(X).sum(), loss)
        model(X).sum().backward()
    assert all(torch.equal(p.grad, e) for p, e in zip(model.parameters(), expected, strict=True))
    assert_same_state(model, before)
    assert_clean(model)


WHERES = {
    "text": "0",
    "glob": "{0,2}",
    "type": nn.Linear,
    "pattern": re.compile("^[02]$", re.IGNORECASE),
    "pair": (nn.Linear, ":input"),
    "list": ["0", (nn.ReLU, ":input"), re.compile("2")],
    "tuple": ("0", "2"),
}


@pytest.mark.parametrize("name", WHERES)
def test_a_saved_place_is_the_same_places(name, model, tmp_path):
    hl.Recipe([(WHERES[name], hl.zero())]).save(tmp_path)
    ((where, _),) = hl.Recipe.load(tmp_path, allow_functions=True)
    assert hl.select(model, where) == hl.select(model, WHERES[name])


ATS = {
    "last": np.s_[:, -1],
    "ellipsis": np.s_[..., 1:3],
    "steps": np.s_[::2],
    "list": np.s_[:, [0, 2]],
    "mask": torch.tensor([True, False, True, False, True]),
    "numpy": np.array([0, 3]),
    "numpy integer": np.int64(2),
    "slice to a tensor": np.s_[torch.tensor(1) :, : np.int64(2)],
    "heads": hl.heads(1, of=2),
}


@pytest.mark.parametrize("name", ATS)
def test_a_saved_slice_is_the_same_slice(name, model, tmp_path):
    with hl.edit(model, "0", hl.add(7.0), at=ATS[name]):
        expected = model(X)
    hl.Recipe([("0", hl.add(7.0))], at=ATS[name]).save(tmp_path)
    with hl.Recipe.load(tmp_path).on(model):
        assert torch.equal(model(X), expected)


def test_the_last_token_is_saved_with_its_mask(tmp_path):
    model, x = nn.Sequential(nn.Identity()), torch.ones(2, 3, 4)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    hl.Recipe([("0", hl.zero())], at=hl.last_token(mask)).save(tmp_path)
    with hl.Recipe.load(tmp_path).on(model):
        assert (model(x) == 0).all(-1).tolist() == [[False, True, False], [False, False, True]]


@pytest.mark.parametrize(
    "calls", [1, slice(1, None), {0, 2}, range(2), np.int64(1), torch.tensor(1)]
)
def test_saved_calls_are_the_same_calls(calls, model, tmp_path):
    with hl.edit(model, "0", hl.zero(), calls=calls):
        expected = [model(X) for _ in range(4)]
    hl.Recipe([("0", hl.zero())], calls=calls).save(tmp_path)
    with hl.Recipe.load(tmp_path).on(model):
        assert all(torch.equal(model(X), e) for e in expected)


def test_a_recipe_is_attached_and_removed(model):
    bare = model(X)
    hl.Recipe([("0", hl.zero()), ("2", hl.add(1.0))]).on(model).attach()  # the model keeps it
    changed = model(X)
    assert not torch.equal(changed, bare)
    assert len(hl.attached(model)) == 2
    hl.attached(model).remove()
    assert torch.equal(model(X), bare)
    handle = hl.Recipe([("0", hl.zero())]).on(model).attach()
    handle.remove()
    handle.remove()
    assert torch.equal(model(X), bare)
    assert_clean(model)


def test_a_recipe_that_is_not_entered_warns(model):
    with pytest.warns(hl.HooklineWarning, match="never entered"):
        hl.Recipe([("0", hl.zero())]).on(model)


def test_the_entry_that_does_not_fit_is_named_and_nothing_stays(model):
    recipe = hl.Recipe([("0", hl.zero()), ("7.mlp", hl.scale(2.0))])
    with pytest.raises(hl.RecipeError, match=r"Sequential, and entry 2 of 2 .*'7.mlp'"):
        with recipe.on(model):
            pass
    with pytest.raises(hl.RecipeError):
        recipe.on(model).attach()
    assert_clean(model)
    with pytest.raises(hl.ChangeError) as caught, hl.Recipe([("0", hl.add(X))]).on(model):
        model(X)
    assert any("entry 1 of 1 of the recipe, '0'" in note for note in caught.value.__notes__)
    assert_clean(model)


def test_an_entry_at_which_nothing_happened_is_named(model):
    with pytest.raises(hl.NeverFired) as caught:
        with hl.Recipe([("0", hl.zero()), ("2", hl.zero())]).on(model):
            model[0](X)
    assert any("entry 2 of 2" in note for note in caught.value.__notes__)


def test_functions_are_saved_by_their_path_and_loaded_only_if_allowed(model, tmp_path):
    recipe = hl.Recipe([("0", doubled), ("2", by_call), ("1", torch.relu)])
    with recipe.on(model):
        expected = model(X), model(X)
    recipe.save(tmp_path)
    saved = json.loads((tmp_path / "recipe.json").read_text())
    assert saved["entries"][0]["change"] == {"function": f"{__name__}:doubled"}
    with pytest.raises(hl.RecipeError, match=r"entry 1.*doubled.*allow_functions=True"):
        hl.Recipe.load(tmp_path)
    with hl.Recipe.load(tmp_path, allow_functions=True).on(model):
        assert torch.equal(model(X), expected[0])
        assert torch.equal(model(X), expected[1])


class Own(hl.Change):
    def apply(self, value, call):
        return value


def unsaved():
    model = small()
    with hl.capture(model, "0") as record:
        model(X)

    def local(value):
        return value

    return {
        "a lambda": [("0", lambda value: value)],
        "made inside a function": [("0", local)],
        "no name to import": [("0", nn.ReLU())],
        "belongs to one run": [("0", hl.patch(record))],
        "Own is no ready change": [("0", Own())],
        "module object, a Linear": [(model[0], hl.zero())],
        "whose code cannot be saved": [(lambda name, module: True, hl.zero())],
        "is a ndarray": [("0", hl.add(np.ones(4)))],
        "expression of bytes": [(re.compile(b"0"), hl.zero())],
        "is a Sparse|sparse": [("0", hl.add(torch.eye(3).to_sparse()))],
    }


@pytest.mark.parametrize("reason", unsaved())
def test_what_cannot_be_saved_is_refused_with_the_reason(reason, tmp_path):
    with pytest.raises(hl.RecipeError, match=reason) as caught:
        hl.Recipe([("1", hl.zero()), *unsaved()[reason]]).save(tmp_path / "new")
    assert "Entry 2 of the recipe" in caught.value.asked
    assert caught.value.remedy
    assert not (tmp_path / "new").exists()


def test_a_function_of_a_script_or_notebook_is_said_to_be_one(tmp_path, monkeypatch):
    monkeypatch.setattr(doubled, "__module__", "__main__")
    with pytest.raises(hl.RecipeError, match=r"doubled is in __main__.*cannot be imported"):
        hl.Recipe([("0", doubled)]).save(tmp_path)


def test_tensors_are_saved_detached_once_and_also_views(tmp_path):
    big = torch.randn(100, 100, requires_grad=True)
    view = big[:, 0]
    both = hl.add(view) | hl.scale(view) | hl.replace(torch.tensor([1 + 2j]))
    hl.Recipe([("0", both)]).save(tmp_path)
    assert (tmp_path / "recipe.safetensors").stat().st_size < 2_000
    ((_, change),) = hl.Recipe.load(tmp_path)
    assert torch.equal(change.changes[0].values, view)
    assert not change.changes[0].values.requires_grad
    assert change.changes[1].factor is change.changes[0].values
    assert torch.equal(change.changes[2].values, torch.tensor([1 + 2j]))


def test_a_recipe_shows_itself_without_its_numbers():
    recipe = hl.Recipe([("<b>", torch.zeros(3, 4))], at=np.s_[:, -1], calls={1, 2})
    assert repr(recipe).splitlines() == [
        "Recipe of 1 edit",
        "  where  change                          at       calls",
        "  '<b>'  replace(values=(3, 4) float32)  (:, -1)  [1, 2]",
    ]
    assert "&lt;b&gt;" in recipe._repr_html_()
    assert repr(hl.Recipe()) == "Recipe of 0 edits"
    assert len(recipe + recipe) == 2
    assert len(sum([recipe, recipe, recipe])) == 3
    shown = repr(hl.Recipe([("0", torch.sigmoid)], at=hl.last_token(torch.ones(2, 3))))
    assert shown.splitlines()[-1] == "  '0'    sigmoid  last_token((2, 3) float32)"


def test_what_is_no_entry_is_refused():
    with pytest.raises(hl.RecipeError, match="entry 1"):
        hl.Recipe(["0"])
    with pytest.raises(hl.ChangeError):
        hl.Recipe([("0", "scale")])
    with pytest.raises(hl.ChangeError):
        hl.Recipe([("0", hl.zero())], calls=-1)
    for join in (lambda: hl.Recipe() + 1, lambda: 1 + hl.Recipe()):
        with pytest.raises(TypeError):
            join()


# -- foreign and hostile files --------------------------------------------------------------------


@pytest.fixture
def saved_folder(tmp_path):
    entries = [("0", hl.add(VECTOR)), (nn.Linear, hl.scale(2.0)), ("*", hl.noise(0.1))]
    return hl.Recipe(entries, at=np.s_[:, 1:], calls=[0, 1]).save(tmp_path / "recipe")


HOSTILE = {
    "no list": lambda c: c.update(entries={}),
    "no tensor '9'": lambda c: c["entries"][0]["change"].update(values={"tensor": "9"}),
    "no ready change": lambda c: c["entries"][0]["change"].update(change="eval"),
    "no ready change ": lambda c: c["entries"][0]["change"].update(change=["add"]),
    "just change, dim, values": lambda c: c["entries"][0]["change"].update(more=1),
    "factor of scale": lambda c: c["entries"][1]["change"].update(factor=None),
    "std of noise": lambda c: c["entries"][2]["change"].update(std=True),
    "no type of modules": lambda c: c["entries"][1].update(where={"type": "builtins:dict"}),
    "not imported": lambda c: c["entries"][1].update(where={"type": "antigravity:Linear"}),
    "no import path": lambda c: c["entries"][1].update(where={"type": "os;x:system"}),
    "there is no Nothing": lambda c: c["entries"][1].update(where={"type": "torch.nn:Nothing"}),
    "no regular expression": lambda c: c["entries"][2].update(where={"pattern": 1, "flags": 32}),
    "just flags, pattern": lambda c: c["entries"][2].update(where={"pattern": "a"}),
    "regular expression 'a'": lambda c: c["entries"][2].update(where={"pattern": "a", "flags": 32}),
    "dim of add is True": lambda c: c["entries"][0]["change"].update(dim=True),
    "aligns 1-D tensors": lambda c: c["entries"][1]["change"].update(dim=1),
    "no slice": lambda c: c["entries"][0].update(at={"slice": ["a", None, None]}),
    "not JSON|nothing that is known": lambda c: c["entries"][0].update(at={"function": "os:x"}),
    "functions were not allowed": lambda c: c["entries"][0].update(
        change={"function": "os:system"}
    ),
    "too large": lambda c: c["entries"][1]["change"].update(factor={"complex": [10**400, 0]}),
    "Calls are whole": lambda c: c["entries"][0].update(calls=["a"]),
    "just at, calls": lambda c: c["entries"][0].pop("at"),
    "just at, calls ": lambda c: c["entries"].insert(0, 5),
    "version 2": lambda c: c.update(version=2),
    "does not say": lambda c: c.update(format="zip"),
    "not the file that was written": lambda c: c.update(tensors="0" * 64),
    "no tensor": lambda c: c.update(tensors=None),
}


@pytest.mark.parametrize("found", HOSTILE)
def test_a_file_that_was_tampered_with_is_an_error(found, saved_folder):
    rewrite_json(saved_folder / "recipe.json", HOSTILE[found])
    with pytest.raises(hl.RecipeError, match=found.strip()) as caught:
        hl.Recipe.load(saved_folder)
    assert caught.value.asked
    assert caught.value.remedy


def test_a_regular_expression_is_loaded_only_if_allowed(saved_folder):
    """Written by hand: in a long name such a search goes on for ages, and `re` has no timeout."""
    for where in (
        {"pattern": "(a+)+$", "flags": 32},
        [{"pattern": "(a|a)*b", "flags": 32}],
        {"tuple": [{"pattern": "(a+)+$", "flags": 32}, ":input"]},
    ):
        rewrite_json(
            saved_folder / "recipe.json", lambda c, where=where: c["entries"][1].update(where=where)
        )
        with pytest.raises(hl.RecipeError, match="regular expression") as caught:
            hl.Recipe.load(saved_folder)
        assert str(saved_folder) in caught.value.asked
        assert "entry 2" in caught.value.found
        assert "allow_functions=True" in caught.value.remedy
    fine = {"pattern": "^(0|2)$", "flags": 32}
    rewrite_json(saved_folder / "recipe.json", lambda c: c["entries"][1].update(where=fine))
    (_, (where, _), _) = hl.Recipe.load(saved_folder, allow_functions=True)
    assert where == re.compile("^(0|2)$")
    for wrong in ({"pattern": "(", "flags": 32}, {"pattern": "a", "flags": 1 << 80}):
        rewrite_json(
            saved_folder / "recipe.json", lambda c, wrong=wrong: c["entries"][1].update(where=wrong)
        )
        with pytest.raises(hl.RecipeError, match="no regular expression"):
            hl.Recipe.load(saved_folder, allow_functions=True)


@pytest.mark.parametrize("where", ["*{}" * 90 + "z", "{,}" * 90 + "z", "{a.b,c.d}" * 30])
def test_no_place_in_a_file_keeps_a_recipe_from_being_entered(where, saved_folder, model):
    rewrite_json(saved_folder / "recipe.json", lambda c: c["entries"][0].update(where=where))
    with (
        pytest.raises(hl.RecipeError, match="entry 1 of 3"),
        hl.Recipe.load(saved_folder).on(model),
    ):
        pass
    assert_clean(model)


def test_foreign_folders_are_errors(saved_folder, tmp_path):
    with pytest.raises(hl.RecipeError, match=r"no file recipe.json.*by hookline.Recipe.save"):
        hl.Recipe.load(tmp_path)
    (saved_folder / "recipe.json").write_bytes(b"\x80\x04]" * 9)
    with pytest.raises(hl.RecipeError, match="cannot be read as JSON"):
        hl.Recipe.load(saved_folder)
    (saved_folder / "recipe.json").write_text("[" * 200_000)
    with pytest.raises(hl.RecipeError, match="cannot be read as JSON"):
        hl.Recipe.load(saved_folder)
    (saved_folder / "recipe.json").write_text("[]")
    with pytest.raises(hl.RecipeError, match="does not say"):
        hl.Recipe.load(saved_folder)


def test_missing_and_torn_tensors_are_errors(saved_folder):
    path = saved_folder / "recipe.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1])
    with pytest.raises(hl.RecipeError, match="not the file"):
        hl.Recipe.load(saved_folder)
    path.unlink()
    with pytest.raises(hl.RecipeError, match="tensors are missing"):
        hl.Recipe.load(saved_folder)


@pytest.mark.parametrize("levels", [900, 1100])
def test_deep_nesting_is_an_error_and_no_crash(saved_folder, levels):
    path = saved_folder / "recipe.json"
    content = json.loads(path.read_text())
    content["entries"][0]["at"] = "HERE"
    path.write_text(json.dumps(content).replace('"HERE"', "[" * levels + "1" + "]" * levels))
    try:
        hl.Recipe.load(saved_folder)
    except hl.RecipeError:
        return
    assert levels == 900  # whether Python can read that many depends on its version


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(st.data())
def test_any_flipped_byte_gives_a_recipe_or_an_error_of_ours(saved_folder, data):
    path = saved_folder / data.draw(st.sampled_from(["recipe.json", "recipe.safetensors"]))
    whole = path.read_bytes()
    at = data.draw(st.integers(0, len(whole) - 1))
    path.write_bytes(whole[:at] + bytes([data.draw(st.integers(0, 255))]) + whole[at + 1 :])
    try:
        hl.Recipe.load(saved_folder)
    except hl.RecipeError:
        pass
    finally:
        path.write_bytes(whole)


def test_saving_again_replaces_what_was_there(saved_folder):
    hl.Recipe([("0", hl.zero())]).save(saved_folder)
    assert sorted(path.name for path in saved_folder.iterdir()) == ["recipe.json"]
    assert repr(hl.Recipe.load(saved_folder)) == repr(hl.Recipe([("0", hl.zero())]))


def test_saving_where_a_file_is_says_so(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in ("file", "file/inside"):
        with pytest.raises(hl.HooklineError, match="cannot be made a folder"):
            hl.Recipe([("0", hl.zero())]).save(tmp_path / folder)


def test_a_dict_is_taken_as_edit_takes_it():
    model, x = nn.Sequential(nn.Identity(), nn.ReLU()), torch.ones(1, 2)
    changes = {"0": hl.scale(2.0), nn.ReLU: hl.add(torch.ones(2))}
    with hl.edit(model, changes):
        expected = model(x)
    with hl.Recipe(changes).on(model):
        assert torch.equal(model(x), expected)
    assert [where for where, _ in hl.Recipe(changes)] == ["0", nn.ReLU]


@pytest.mark.parametrize("calls", ["prompt", "generated"])
def test_the_step_of_a_generation_is_saved(calls, tmp_path):
    recipe = hl.Recipe([("0", hl.zero())], calls=calls)
    assert repr(calls) in repr(recipe)
    recipe.save(tmp_path)
    loaded = hl.Recipe.load(tmp_path)
    assert repr(loaded) == repr(recipe)
    with pytest.raises(hl.errors.RecipeError, match="takes a cache"):
        with loaded.on(nn.Sequential(nn.Identity())):
            raise AssertionError("must not be entered")


def test_a_step_that_there_is_not_is_refused(tmp_path):
    with pytest.raises(hl.ChangeError, match="'prompts'"):
        hl.Recipe([("0", hl.zero())], calls="prompts")
