"""Optimizer updates: one definition, executed on the host and on the device.

``definition.py`` says what an update is (rules, per-step scalars, the reference in plain torch operations) and
``formats.py`` how a chunk's states are stored. ``host.py`` executes updates on CPU cores (``kernel.c`` through
``native.py``, or torch operations where no compiler exists), ``device.py`` on the device that holds the states.
All three read the same :class:`~protrain_compile.updates.definition.Segment` list, and the tests hold them to the
reference, and the reference to ``torch.optim``.
"""
