"""hookline inside other libraries, each of which is loaded only with its own file here.

- `ray`: harvest with Ray Data
"""
