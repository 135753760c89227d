"""The profiler: what templates and the machine cost, measured or estimated.

``hardware`` measures the machine, ``templates`` the compiled parts, ``nodes`` every ATen node; ``cache`` keeps what
was measured. ``estimate`` says the same of a machine that is not at hand, from its HardwareProfile::

    kernels (from flops)  ->  estimate          which kernels a graph becomes, and how long each takes
                          ->  footprint         how much memory they need while they run
"""
