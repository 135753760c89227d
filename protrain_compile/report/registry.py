"""The compiled graphs that are alive, so that ``schedule(model)`` can find a model's.

Dynamo gives no way from a compiled model to what its backend returned. This set holds the graphs weakly; it is an index
for reports and nothing that compiles or runs reads it.
"""

from __future__ import annotations

import weakref

from protrain_compile.runtime.compiled_graph import CompiledGraph

live_graphs: weakref.WeakSet[CompiledGraph] = weakref.WeakSet()
