"""Modules that run repeatedly: generation with a cache, loops, shared layers."""

import threading
from collections import defaultdict

import numpy as np
import pytest
import torch
from language_models import (
    HEADS,
    LANGUAGE_MODELS,
    LENGTH,
    NEW,
    WIDTH,
    WORDS,
    described,
    generate,
    padded_prompts,
    prompt,
    tiny,
)
from models import CellLoop
from oracles import assert_clean, by_hand
from torch import nn

import hookline as hl

transformers = pytest.importorskip("transformers")


@pytest.fixture(params=LANGUAGE_MODELS)
def kind(request):
    return described(request.param)


# -- every call is there, in order ----------------------------------------------------------------


def test_a_capture_of_a_generation_holds_every_call_in_order(kind):
    hooked = by_hand(kind.model, generate)
    expected, seen = hooked.result, hooked.outputs
    with hl.capture(kind.model, "", "**") as record:
        words = generate(kind.model)
    assert torch.equal(words, expected)
    assert {place.path for place in record.places()} == set(seen)
    for path, values in seen.items():
        kept = record.calls(path)
        assert len(kept) == len(values)
        for value, other in zip(kept, values, strict=True):
            assert type(value) is type(other)
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, other)
    assert_clean(kind.model)


def test_calls_of_several_modules_are_seen_in_the_order_of_the_forward(kind):
    expected = by_hand(kind.model, generate).order
    order = []
    with hl.hook(
        kind.model, ["", "**"], lambda value, call: order.append((call.place, call.index))
    ):
        generate(kind.model)
    assert [place.path for place, _ in order] == expected
    seen = defaultdict(int)
    for place, index in order:
        assert index == seen[place]
        seen[place] += 1


def test_the_first_call_has_the_prompt_and_the_others_one_token_each(decoder):
    with hl.capture(decoder.model, decoder.mlp, decoder.embed + ":input") as record:
        words = generate(decoder.model)
    shapes = [tuple(value.shape) for value in record.calls(decoder.mlp)]
    assert shapes == [(2, LENGTH, WIDTH)] + [(2, 1, WIDTH)] * (NEW - 1)
    assert torch.equal(record.cat(decoder.embed + ":input", 1), words[:, :-1])


def test_without_a_cache_every_call_has_all_tokens_so_far(decoder):
    with hl.capture(decoder.model, decoder.mlp) as record:
        generate(decoder.model, use_cache=False)
    assert [v.shape[1] for v in record.calls(decoder.mlp)] == list(range(LENGTH, LENGTH + NEW))


def test_an_encoder_runs_once_and_its_keys_are_cached():
    model = tiny("T5")
    cross = "decoder.block.*.layer.1.EncDecAttention"
    with hl.capture(model, "encoder.block.*", "decoder.embed_tokens", f"{cross}.{{q,k}}") as record:
        generate(model)
    counts = {str(place): len(record.calls(place)) for place in record.places()}
    assert counts["encoder.block.0"] == counts["encoder.block.1"] == 1
    assert counts["decoder.embed_tokens"] == NEW
    assert counts["decoder.block.0.layer.1.EncDecAttention.q"] == NEW
    assert counts["decoder.block.0.layer.1.EncDecAttention.k"] == 1


@pytest.mark.parametrize(
    "options",
    [{"do_sample": True, "top_k": 10}, {"num_beams": 3}, {"cache_implementation": "static"}],
    ids=["sampling", "beams", "static cache"],
)
def test_other_ways_to_generate_give_the_same_words_with_a_capture(decoder, options):
    def run(model):
        torch.manual_seed(7)
        return generate(model, **options)

    hooked = by_hand(decoder.model, run)
    expected, seen = hooked.result, hooked.outputs
    state = torch.get_rng_state()
    with hl.capture(decoder.model, "**", "**:inputs") as record:
        words = run(decoder.model)
    assert torch.equal(words, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert len(seen[decoder.mlp]) == NEW
    for value, other in zip(record.calls(decoder.mlp), seen[decoder.mlp], strict=True):
        assert torch.equal(value, other)


def test_a_second_generation_in_the_same_block_goes_on_counting(decoder):
    with hl.capture(decoder.model, decoder.mlp) as record:
        generate(decoder.model)
        generate(decoder.model, prompt(seed=1))
    assert len(record.calls(decoder.mlp)) == 2 * NEW
    assert record[decoder.mlp, NEW].shape[1] == LENGTH


def test_keep_says_which_call_of_a_generation_is_kept(decoder):
    seen = by_hand(decoder.model, generate).outputs
    for keep, n in (("first", 0), ("last", -1)):
        with hl.capture(decoder.model, decoder.mlp, keep=keep) as record:
            generate(decoder.model)
        assert torch.equal(record[decoder.mlp], seen[decoder.mlp][n])


def test_stop_ends_a_generation_at_the_first_call(decoder):
    words = generate(decoder.model)
    with hl.capture(decoder.model, decoder.block, stop=True) as record:
        generate(decoder.model)
        raise AssertionError("the rest of the block must not run")
    assert len(record.calls(decoder.block)) == 1
    assert_clean(decoder.model)
    assert torch.equal(generate(decoder.model), words)


def test_a_generation_in_another_thread_is_seen_if_asked_for(decoder):
    def run():
        thread = threading.Thread(target=generate, args=(decoder.model,))
        thread.start()
        thread.join()

    with pytest.raises(hl.NeverFired, match="another thread"):
        with hl.capture(decoder.model, decoder.mlp):
            run()
    with hl.capture(decoder.model, decoder.mlp, threads="all") as record:
        run()
    assert len(record.calls(decoder.mlp)) == NEW


# -- joined calls ---------------------------------------------------------------------------------


def test_cat_joins_the_calls_along_the_sequence(kind):
    hooked = by_hand(kind.model, generate)
    words, seen = hooked.result, hooked.outputs
    with hl.capture(kind.model, kind.mlp, kind.norm) as record:
        generate(kind.model)
    for place in (kind.mlp, kind.norm):
        assert torch.equal(record.cat(place, 1), torch.cat(seen[place], 1))
    assert record.cat(kind.norm, dim=1).shape[:2] == words[:, :-1].shape


def test_the_joined_calls_are_those_of_one_forward_over_all_words(decoder):
    with hl.capture(decoder.model, decoder.mlp, decoder.norm) as record:
        words = generate(decoder.model)
    with torch.no_grad(), hl.capture(decoder.model, decoder.mlp, decoder.norm) as whole:
        decoder.model(words[:, :-1])
    for place in (decoder.mlp, decoder.norm):
        torch.testing.assert_close(record.cat(place, 1), whole[place], atol=1e-4, rtol=1e-4)


def test_stack_joins_the_last_positions_of_all_calls(decoder):
    seen = by_hand(decoder.model, generate).outputs
    with hl.capture(decoder.model, decoder.mlp, at=np.s_[:, -1]) as record:
        generate(decoder.model)
    stacked = record.stack(decoder.mlp)
    assert stacked.shape == (NEW, 2, WIDTH)
    assert torch.equal(stacked, torch.stack([value[:, -1] for value in seen[decoder.mlp]]))
    assert torch.equal(record.stack(decoder.mlp, 1), stacked.transpose(0, 1))


def test_calls_of_different_shapes_cannot_be_stacked(decoder):
    with hl.capture(decoder.model, decoder.mlp) as record:
        generate(decoder.model)
    with pytest.raises(RuntimeError, match="equal size"):
        record.stack(decoder.mlp)


def test_a_part_of_every_call_is_joined(decoder):
    name = decoder.heads.rpartition(".")[0]  # the attention: it returns a tuple
    with hl.capture(decoder.model, name, decoder.heads) as record:
        generate(decoder.model)
    assert torch.equal(record.cat(f"{name}[0]", 1), record.cat(decoder.heads, 1))
    with hl.capture(decoder.model, f"{name}[0]") as part:
        generate(decoder.model)
    assert torch.equal(part.cat(f"{name}[0]", 1), record.cat(f"{name}[0]", 1))


# -- edits ----------------------------------------------------------------------------------------


def counting(change, wanted):
    """A hook by hand that changes the output of some calls."""
    calls = []

    def hook(module, args, output):
        calls.append(None)
        return change(output) if len(calls) - 1 in wanted else None

    return hook


@pytest.mark.parametrize(
    ("calls", "wanted"),
    [
        (None, range(NEW)),
        (0, {0}),
        (NEW - 1, {NEW - 1}),
        (slice(1, None), range(1, NEW)),
        (slice(0, None, 2), {0, 2, 4}),
        ({1, 3}, {1, 3}),
    ],
)
def test_an_edit_changes_the_calls_that_were_named(kind, calls, wanted):
    bare = generate(kind.model)

    def change(value):
        return value * -3.0 + 0.5

    handle = kind.model.get_submodule(kind.mlp).register_forward_hook(counting(change, wanted))
    hooked = by_hand(kind.model, generate)
    expected, seen = hooked.result, hooked.outputs
    handle.remove()
    with hl.edit(kind.model, kind.mlp, change, calls=calls):
        with hl.capture(kind.model, kind.mlp, "lm_head") as record:
            words = generate(kind.model)
    assert torch.equal(words, expected)
    for place in (kind.mlp, "lm_head"):
        for value, other in zip(record.calls(place), seen[place], strict=True):
            assert torch.equal(value, other)
    assert torch.equal(generate(kind.model), bare)
    assert_clean(kind.model)


def test_an_edit_does_change_the_words(decoder):
    bare = generate(decoder.model)
    word = (bare[:, LENGTH + 1] + 1) % WORDS
    wish = nn.functional.one_hot(word, WORDS).float()[:, None] * 100

    with hl.edit(decoder.model, "lm_head", wish, calls=1):
        words = generate(decoder.model)
    assert torch.equal(words[:, : LENGTH + 1], bare[:, : LENGTH + 1])
    assert torch.equal(words[:, LENGTH + 1], word)


def test_an_edit_of_a_call_that_never_comes_is_told(decoder):
    with pytest.raises(hl.NeverFired, match=f"called {NEW}×"):
        with hl.edit(decoder.model, decoder.mlp, hl.zero(), calls=NEW):
            generate(decoder.model)


def test_an_edited_prompt_stays_in_the_cache(decoder):
    """The keys and values of an edited first call act on all later ones, as with hooks by hand."""
    hook = counting(lambda output: output * 2, {0})
    handle = decoder.model.get_submodule(decoder.embed).register_forward_hook(hook)
    seen = by_hand(decoder.model, generate).outputs
    handle.remove()
    with hl.edit(decoder.model, decoder.embed, hl.scale(2.0), calls=0):
        with hl.capture(decoder.model, decoder.norm) as record:
            generate(decoder.model)
    for value, other in zip(record.calls(decoder.norm), seen[decoder.norm], strict=True):
        assert torch.equal(value, other)


def test_a_patch_puts_in_what_each_call_of_another_generation_had(decoder):
    with hl.capture(decoder.model, "lm_head") as clean:
        expected = generate(decoder.model)
    other = prompt(seed=1)
    assert not torch.equal(generate(decoder.model, other)[:, LENGTH:], expected[:, LENGTH:])
    with hl.edit(decoder.model, "lm_head", hl.patch(clean)):
        words = generate(decoder.model, other)
    assert torch.equal(words[:, LENGTH:], expected[:, LENGTH:])


# -- positions and heads --------------------------------------------------------------------------


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_last_token_is_found_with_padding_on_either_side(decoder, side):
    ids, mask = padded_prompts(side)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    last = [LENGTH - 1, LENGTH - 1] if side == "left" else [2, LENGTH - 1]
    with torch.no_grad():
        with hl.capture(decoder.model, decoder.mlp, at=hl.last_token(mask)) as record:
            decoder.model(ids, attention_mask=mask, position_ids=positions)
        seen = by_hand(
            decoder.model, lambda m: m(ids, attention_mask=mask, position_ids=positions)
        ).outputs
        with hl.capture(decoder.model, decoder.mlp) as alone:
            decoder.model(ids[:1][mask[:1].bool()][None])
    (whole,) = seen[decoder.mlp]
    assert torch.equal(record[decoder.mlp], torch.stack([whole[0, last[0]], whole[1, last[1]]]))
    torch.testing.assert_close(
        record[decoder.mlp][0], alone[decoder.mlp][0, -1], atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("side", ["left", "right"])
def test_an_edit_at_the_last_token_leaves_the_others_alone(decoder, side):
    ids, mask = padded_prompts(side)
    rows, last = torch.arange(2), torch.tensor([LENGTH - 1 if side == "left" else 2, LENGTH - 1])

    def by_hand_(module, args, output):
        changed = output.clone()
        changed[rows, last] = 0
        return changed

    run = decoder.model.get_submodule(decoder.mlp)
    with torch.no_grad():
        handle = run.register_forward_hook(by_hand_)
        expected = decoder.model(ids, attention_mask=mask).logits
        handle.remove()
        with hl.edit(decoder.model, decoder.mlp, hl.zero(), at=hl.last_token(mask)):
            logits = decoder.model(ids, attention_mask=mask).logits
        bare = decoder.model(ids, attention_mask=mask).logits
    assert torch.equal(logits, expected)
    assert not torch.equal(logits[rows, last], bare[rows, last])


def test_the_last_token_of_the_prompt_is_that_of_the_first_call(decoder):
    ids, mask = padded_prompts("left")

    def run(model):
        return generate(model, ids, attention_mask=mask)

    hooked = by_hand(decoder.model, run)
    expected, seen = hooked.result, hooked.outputs
    options = {"at": hl.last_token(mask), "keep": "first"}
    with hl.capture(decoder.model, decoder.mlp, **options) as record:
        words = run(decoder.model)
    assert torch.equal(words, expected)
    assert torch.equal(record[decoder.mlp], seen[decoder.mlp][0][:, -1])

    hook = counting(lambda output: torch.cat([output[:, :-1], output[:, -1:] * 9], 1), {0})
    handle = decoder.model.get_submodule(decoder.mlp).register_forward_hook(hook)
    expected = run(decoder.model)
    handle.remove()
    with hl.edit(decoder.model, decoder.mlp, hl.scale(9.0), at=hl.last_token(mask), calls=0):
        assert torch.equal(run(decoder.model), expected)


def test_a_mask_of_the_prompt_does_not_fit_later_calls_and_that_is_told(decoder):
    ids, mask = padded_prompts("left")
    bare = generate(decoder.model, ids, attention_mask=mask)
    with hl.capture(decoder.model, decoder.mlp, at=hl.last_token(mask)) as record:
        assert torch.equal(generate(decoder.model, ids, attention_mask=mask), bare)
    assert record[decoder.mlp, 0].shape == (2, WIDTH)
    with pytest.raises(hl.NotCaptured, match="mask has the shape") as caught:
        record[decoder.mlp, 1]
    assert decoder.mlp in str(caught.value)
    with pytest.raises(hl.ChangeError, match=f"{decoder.mlp}.*mask has the shape"):
        with hl.edit(decoder.model, decoder.mlp, hl.zero(), at=hl.last_token(mask)):
            generate(decoder.model, ids, attention_mask=mask)
    assert_clean(decoder.model)


@pytest.mark.parametrize("which", [(0,), (3,), (1, 2), (-1,)])
def test_heads_are_the_slices_that_one_would_cut_by_hand(kind, which):
    place = kind.heads + ":input"
    size = WIDTH // HEADS
    with hl.capture(kind.model, place) as whole:
        generate(kind.model)
    with hl.capture(kind.model, place, at=hl.heads(*which, of=HEADS)) as record:
        generate(kind.model)
    for value, full in zip(record.calls(place), whole.calls(place), strict=True):
        heads = full.unflatten(-1, (HEADS, size))
        assert torch.equal(value, heads[..., list(which), :].flatten(-2))


@pytest.mark.parametrize("which", [(0,), (1, 2)])
@pytest.mark.parametrize(("calls", "wanted"), [(None, range(NEW)), (slice(1, 3), {1, 2})])
def test_ablated_heads_are_those_of_a_hook_by_hand(kind, which, calls, wanted):
    seen = []

    def ablate(module, args):
        seen.append(None)
        if len(seen) - 1 not in wanted:
            return None
        heads = args[0].clone().unflatten(-1, (HEADS, -1))
        heads[..., list(which), :] = 0
        return (heads.flatten(-2),)

    handle = kind.model.get_submodule(kind.heads).register_forward_pre_hook(ablate)
    expected = by_hand(kind.model, generate).outputs
    handle.remove()
    options = {"at": hl.heads(*which, of=HEADS), "calls": calls}
    with hl.edit(kind.model, kind.heads + ":input", hl.zero(), **options):
        with hl.capture(kind.model, kind.heads, "lm_head") as record:
            generate(kind.model)
    for place in (kind.heads, "lm_head"):
        for value, other in zip(record.calls(place), expected[place], strict=True):
            assert torch.equal(value, other)


# -- caches ---------------------------------------------------------------------------------------


def test_a_cache_in_a_captured_input_is_kept_by_reference(decoder):
    """It is an opaque object: at every call it reads as it is at the end."""
    place = decoder.block + ":inputs"
    with hl.capture(decoder.model, place) as record:
        generate(decoder.model)
    caches = [inputs["past_key_values"] for inputs in record.calls(place)]
    assert len(caches) == NEW
    assert all(cache is caches[0] for cache in caches)
    assert caches[0].get_seq_length() == LENGTH + NEW - 1


def test_a_cache_in_a_captured_output_is_kept_by_reference(kind):
    with hl.capture(kind.model, "") as record:
        words = generate(kind.model)
    outputs = record.calls("")
    caches = [output.past_key_values for output in outputs]
    assert all(cache is caches[0] for cache in caches)
    assert caches[0].get_seq_length() == words.shape[1] - 1
    assert torch.equal(record.cat("[logits]", 1)[:, -1], outputs[-1].logits[:, -1])


def test_what_a_cache_was_at_each_call_is_had_by_a_transform(decoder):
    place = decoder.block + ":inputs"

    def length(inputs):
        return inputs["past_key_values"].get_seq_length()

    with hl.capture(decoder.model, place, transform=length) as record:
        generate(decoder.model)
    assert record.calls(place) == [0, *range(LENGTH, LENGTH + NEW - 1)]


def test_the_keys_of_a_cache_are_those_that_were_captured_along_the_way():
    model = tiny("Llama")
    with hl.capture(model, "model.layers.0.self_attn.v_proj", "") as record:
        generate(model)
    held = record["", -1].past_key_values.layers[0].values
    values = record.cat("model.layers.0.self_attn.v_proj", 1)
    assert torch.equal(held.transpose(1, 2).flatten(2), values)


def test_captured_tensors_stay_as_they_were_while_a_static_cache_is_overwritten():
    model = tiny("Llama")

    def run(model):
        return generate(model, cache_implementation="static")

    seen = by_hand(model, run).outputs
    with hl.capture(model, "**.{k_proj,v_proj}", "**.v_proj:input") as record:
        run(model)
    for layer in range(2):
        for name in ("k_proj", "v_proj"):
            place = f"model.layers.{layer}.self_attn.{name}"
            for value, other in zip(record.calls(place), seen[place], strict=True):
                assert torch.equal(value, other)


def test_gradients_of_a_sequence_in_two_pieces_are_numbered_by_call(decoder):
    ids = prompt()
    model = decoder.model.train(False)

    def run():
        first = model(ids[:, :4], use_cache=True)
        second = model(ids[:, 4:], past_key_values=first.past_key_values)
        logits = torch.cat([first.logits, second.logits], 1)
        (logits * torch.linspace(-1, 1, logits.numel()).reshape(logits.shape)).sum().backward()

    arrived = {}

    def keep(module, args, output):
        call = len(arrived)
        arrived[call] = None
        _ = output.grad_fn
        output.register_hook(lambda grad: arrived.__setitem__(call, grad.clone()))

    handle = model.get_submodule(decoder.mlp).register_forward_hook(keep)
    run()
    handle.remove()
    with hl.capture(model, decoder.mlp + ":grad_output") as record:
        run()
    gradients = record.calls(decoder.mlp + ":grad_output")
    assert [g.shape[1] for g in gradients] == [4, 2]
    for call, gradient in enumerate(gradients):
        assert torch.equal(gradient, arrived[call])


# -- loops and repeated modules -------------------------------------------------------------------

STEPS = torch.randn(7, 2, 3, generator=torch.Generator().manual_seed(0))


def test_every_step_of_a_loop_is_a_call():
    model = CellLoop()
    seen = by_hand(model, lambda m: m(STEPS)).outputs
    with hl.capture(model, "cell", "out", "cell:inputs") as record:
        output = model(STEPS)
    assert torch.equal(record.stack("out"), output)
    assert torch.equal(record.stack("cell[0]"), torch.stack([h for h, _ in seen["cell"]]))
    assert torch.equal(record.stack("cell[1]"), torch.stack([c for _, c in seen["cell"]]))
    assert torch.equal(record.stack("cell:inputs[input]"), STEPS)
    states = [inputs["hx"] for inputs in record.calls("cell:inputs")]
    assert states[0] is None
    assert all(torch.equal(s[0], h) for s, (h, _) in zip(states[1:], seen["cell"], strict=False))


def test_gradients_of_a_loop_are_numbered_by_step():
    model, arrived = CellLoop(), []

    def keep(module, args, output):
        arrived.append(None)
        n = len(arrived) - 1
        output.register_hook(lambda grad: arrived.__setitem__(n, grad.clone()))

    def run():
        weights = torch.arange(1.0, 8.0)[:, None, None]
        (model(STEPS).square() * weights).sum().backward()

    handle = model.out.register_forward_hook(keep)
    run()
    handle.remove()
    with hl.capture(model, "out:grad_output") as record:
        run()
    assert torch.equal(record.stack("out:grad_output"), torch.stack(arrived))


@pytest.mark.parametrize(
    ("calls", "wanted"), [(2, {2}), (slice(5, None), {5, 6}), ({0, 6}, {0, 6})]
)
def test_some_steps_of_a_loop_are_edited(calls, wanted):
    model = CellLoop()
    hook = counting(lambda output: (output[0] * 2, output[1]), wanted)
    handle = model.cell.register_forward_hook(hook)
    expected = model(STEPS)
    handle.remove()
    with hl.edit(model, "cell[0]", hl.scale(2.0), calls=calls):
        assert torch.equal(model(STEPS), expected)


def test_steps_are_counted_from_the_first_since_nobody_knows_the_last():
    for calls in (-1, slice(-2, None), {-1}):
        with pytest.raises(hl.ChangeError, match="from 0"):
            with hl.edit(CellLoop(), "cell[0]", hl.zero(), calls=calls):
                raise AssertionError("must not be entered")


def test_a_layer_that_a_model_shares_over_its_depth_is_one_place_with_many_calls():
    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        embedding_size=8, hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, vocab_size=WORDS, max_position_embeddings=32,
    )  # fmt: skip
    model = transformers.AlbertModel(config).eval()
    layer = "encoder.albert_layer_groups.0.albert_layers.0"
    with torch.no_grad():
        seen = by_hand(model, lambda m: m(prompt())).outputs
        with hl.capture(model, f"{layer}.ffn", "encoder[0]") as record:
            model(prompt())
        assert torch.equal(record.stack(f"{layer}.ffn"), torch.stack(seen[f"{layer}.ffn"]))
        assert record.stack(f"{layer}.ffn").shape[0] == 3

        hook = counting(lambda output: output * 2, {1})
        handle = model.get_submodule(f"{layer}.ffn").register_forward_hook(hook)
        expected = model(prompt()).last_hidden_state
        handle.remove()
        with hl.edit(model, f"{layer}.ffn", hl.scale(2.0), calls=1):
            assert torch.equal(model(prompt()).last_hidden_state, expected)
    assert not torch.equal(expected, record["encoder[0]"])
