"""What a policy sees of one candidate: names, meanings and the version of the layout.

A candidate is a pod on a node, or waiting. The same columns serve every cluster, whatever its node
count and GPU models: hardware is described by numbers, so a new GPU type is a new point and not a
new network. ``agent.scheduling.description`` fills them; changing a column's meaning changes
``FEATURES_VERSION``, and agents and hub refuse each other's policies across versions.
"""

FEATURES_VERSION = 1

FEATURES: tuple[tuple[str, str], ...] = (
    # The pod.
    ("pod_size", "half of (its expected log run time − the mean of the cluster's kinds)"),
    ("pod_gpus", "log2 of its GPUs / 3; −1/3 with none"),
    ("pod_share", "the share of one GPU that it asks for, 0 where whole"),
    ("pod_waited", "log(1 + waited / expected run time) / 2"),
    ("pod_slack", "time to its deadline over its expected run time, −2 to 2; 2 with none"),
    ("pod_same_kind", "log(1 + pending pods of its kind) / 2"),
    ("pod_order", "its distance behind the rule's first pod in the rule's order, 0 to 3"),
    # The node.
    ("wait", "1 for waiting: then the node's columns are 0"),
    ("node_tflops", "FP32 TFLOP/s of its GPUs / 50"),
    ("node_bandwidth", "GB/s of its GPUs / 2000"),
    ("node_gpu_memory", "GiB of its GPUs / 80"),
    ("node_cpu_left", "share of its CPU not asked for once the pod is there"),
    ("node_memory_left", "share of its memory not asked for once the pod is there"),
    ("node_gpus_left", "idle GPUs once the pod is there / 8"),
    ("node_gpu_memory_left", "share of its GPU memory not asked for once the pod is there"),
    ("node_cpu_used", "measured CPU use, 0 to 1; what is asked for where unmeasured"),
    ("node_memory_used", "measured memory use, 0 to 1; what is asked for where unmeasured"),
    ("node_exact_fit", "1 where no idle GPU is left once the pod is there"),
    # The predicted effect of this placement.
    ("effect_slowdown", "predicted log slow-down of the pod there against its fastest type"),
    ("effect_against_best", "log(its expected time there / of its best alternative), −3 to 3"),
    ("effect_neighbours_on_pod", "predicted log slow-down by its neighbours there"),
    ("effect_pod_on_neighbours", "log(1 + delay caused to neighbours / expected run time) / 2"),
    ("effect_fragments", "share of the node's idle GPUs left in gangs that queued pods cannot use"),
    ("effect_best_type_in", "log(1 + time until its fastest type is free / run time) / 2"),
    ("effect_whole_node_in", "log(1 + time until a node of that type is empty / run time) / 2"),
    # The cluster.
    ("queue_length", "log(1 + pending pods) / 4"),
    ("queue_gpus", "log(1 + GPUs asked for by pending pods / GPUs of the cluster)"),
    ("queue_work", "log(1 + expected time to work the queue off / mean run time) / 2"),
    ("queue_ahead", "log(1 + expected time to work off what is shorter / run time) / 2"),
    ("cluster_type_free", "share of that GPU type that is idle"),
    ("cluster_free", "share of all GPUs that are idle"),
    ("cluster_running", "running pods / GPUs of the cluster"),
)
"""Column names with their meaning and unit; all are dimensionless and about −3 to 3."""

FEATURE_NAMES = tuple(name for name, _ in FEATURES)
FEATURE_COUNT = len(FEATURES)
COLUMN = {name: column for column, name in enumerate(FEATURE_NAMES)}
