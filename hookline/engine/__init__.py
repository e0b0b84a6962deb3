"""The engine: hooks at places, and what they do there.

Read `tracer` first: what an open context does at the calls of its modules. `asks` is what can be
asked of a module, `asked_places` at which places; `calls` is a call that runs, `call_numbers` its
number, `events` the log, and `handlers` the object for one place. `context` enters and leaves, on
top of `lifecycle` and `module_hooks`; `hooking` is the verb `hook`. `gradients`, `input_gradients`
and `tensor_hooks` go on into the autograd graph.

The others can wait until they are needed. `call_choice` and `slices` read `calls=` and `at=`,
`arguments` names the inputs of a call, `reasons` words errors, `attaching` lists live contexts.
Each of the rest is about one feature of torch: `operations`, `checkpointing`, `compiling`, `fsdp`,
`offloading`, `generation`.
"""
