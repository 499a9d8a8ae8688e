"""The machinery between environments and updates; it knows agents only by their contract.

In the order in which data flows: ``cycle`` (stepped and fused), ``inferencer``,
``trajectory_queue``, ``update``, ``staging``; beside them ``devices``, ``episodes``, ``timer``.
"""
