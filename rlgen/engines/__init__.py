"""Holds the engines, which sample completions: token ids in, token ids out.

`open.build_engine` opens the one that a recipe names. This file imports nothing, because vLLM's server imports `gate` and
`worker` from this package and only what these need.
"""
