"""Nested tensors of both layouts, whose samples have shapes of their own: measured, or refused."""

import pytest
import torch
from oracles import assert_clean
from torch import nn

import hookline as hl

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
LENGTHS = (2, 4)


class IdentityAndLinear(nn.Module):
    def __init__(self):
        super().__init__()
        self.same = nn.Identity()
        self.fc = nn.Linear(3, 3)

    def forward(self, x):
        return self.fc(self.same(x))


@pytest.fixture(params=[torch.strided, torch.jagged], ids=["strided", "jagged"])
def nested_batch(request):
    rows = [torch.full((length, 3), float(length)) for length in LENGTHS]
    return torch.nested.nested_tensor(rows, layout=request.param)


def padded(value):
    return value.to_padded_tensor(0.0)


def test_a_watched_training_goes_on_with_them(nested_batch):
    model = IdentityAndLinear()
    with hl.watch(model, every=1) as watching:
        padded(model(nested_batch)).sum().backward()
        watching.step()
    assert watching.last["fc.weight", "weight_grad"]["norm"] > 0
    assert_clean(model)


def test_statistics_take_them_as_they_are_and_padded(nested_batch):
    model = IdentityAndLinear()
    mask = torch.arange(4)[None] < torch.tensor(LENGTHS)[:, None]
    for options in ({}, {"at": padded, "mask": mask}):
        found = hl.measure(
            model, "same", statistics=[hl.Mean(dim=None)], data=[[nested_batch]], **options
        )
        assert float(found["same"]["mean"]) == pytest.approx((2 * 2 + 4 * 4) / 6)
    assert_clean(model)


def test_a_harvest_stores_them_as_they_are_and_padded(nested_batch, tmp_path):
    model = IdentityAndLinear()
    store = hl.harvest(model, [[nested_batch]], "same", to=tmp_path / "raw", quiet=True)
    assert [sample.tolist() for sample in store["same"]] == [
        s.tolist() for s in nested_batch.unbind()
    ]
    to = tmp_path / "padded"
    for _ in range(2):  # the second one sees that the data is the same
        store = hl.harvest(model, [[nested_batch]], "same", to=to, transform=padded, quiet=True)
    assert torch.equal(store["same"][:], padded(nested_batch))


def test_a_summary_tells_what_it_could_not_count(nested_batch):
    found = hl.summarize(IdentityAndLinear(), [nested_batch])
    counted = found["fc"].flops == 2 * sum(LENGTHS) * 3 * 3
    assert counted or found.totals["uncounted"] == {"aten.linear": 1}


def test_records_recipes_and_stores_refuse_to_save_them(nested_batch, tmp_path):
    model = IdentityAndLinear()
    with hl.capture(model, "same") as record:
        model(nested_batch)
    with pytest.raises(hl.RecordError, match=r"'same' was to be saved.*nested"):
        hl.save_record(record, tmp_path / "record")
    with pytest.raises(hl.RecipeError, match="It holds a nested tensor"):
        hl.Recipe([("same", hl.replace(nested_batch))]).save(tmp_path / "recipe")
    with hl.Store.create(tmp_path / "store") as writer:
        with pytest.raises(hl.StoreError, match="The value is a nested tensor"):
            writer.append({"same": nested_batch})
        writer.append({"same": torch.zeros(2, 4, 3)})
        with pytest.raises(hl.StoreError, match="The value is a nested tensor"):
            writer.append({"same": nested_batch})
    assert len(hl.Store.open(tmp_path / "store")) == 2


def test_a_sweep_over_them_is_refused(nested_batch):
    model = IdentityAndLinear()
    with pytest.raises(hl.BatchError, match=r"'same' was asked for\. There is a nested tensor"):
        hl.sweep(
            model, [nested_batch], [nested_batch], "same", lambda y: padded(y).sum(), progress=False
        )
    assert_clean(model)


def test_edits_change_them_or_tell_that_torch_cannot(nested_batch):
    model = IdentityAndLinear()
    for change in (hl.scale(2.0), lambda value: value * 2):
        with hl.edit(model, "same", change), hl.capture(model, "same") as record:
            model(nested_batch)
        assert torch.equal(padded(record["same"]), padded(nested_batch) * 2)
    if nested_batch.layout is torch.strided:
        other = torch.nested.nested_tensor([torch.ones(1)])
        cases = [(hl.add(torch.ones(3)), "cannot do that to a nested.*unbind")]
        for change, told in [*cases, (lambda value: other, "now nested")]:
            with pytest.raises(hl.ChangeError, match=told), hl.edit(model, "same", change):
                model(nested_batch)
    assert_clean(model)
