"""Scaling policies of others, each behind the port of `controller`: what Tidegate is compared with.

Emulated from what their sources and documents say, with their defaults, and one knob each that a tuning sweep turns.
`table` names them for the command line; nothing here knows Tidegate's own rules.
"""
