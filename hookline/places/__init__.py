"""The addresses of values: how they are spelled, and what they mean in a model. No hooks yet.

Read `grammar` (a spelled place), `tree` (modules by name), `targets` (what was found), and
`resolution`, which puts the three together. `refusals` has its errors.
"""
