"""What node telemetry would show for the jobs that run, called by the simulator's engine.

Busy CPU, memory, disk and network of every node follow from its jobs, plus noise that is smooth
in time. The noise is a hash of (seed, node, resource, time) and no generator's state, so a
sample depends on nothing but the moment it is taken at: cloned and replayed simulations agree.
"""

import numpy as np

from agent.arrays import Floats, Ints, kernel

CPU, MEMORY, DISK, NETWORK = range(4)
NOISE_PERIOD_S = 60.0  # noise is linear between independent values this far apart
WARM_UP_S = 600.0  # a job's memory climbs to its peak over its first ten minutes
IDLE = (0.03, 0.04, 0.01, 0.01)  # what a node without jobs shows: kubelet, daemons, page cache
DISK_MBPS = 2000.0  # of one node
NETWORK_MBPS = 3000.0  # of one node: 25 Gbit/s


@kernel
def hash_unit(seed: int, node: int, resource: int, tick: int) -> float:
    """A number in [-1, 1) that depends on its four arguments and on nothing else (splitmix64)."""
    state = np.uint64(0)
    for part in (seed, node, resource, tick):
        # The constant keeps zeros from staying zero; mixing each part before the next is added
        # keeps (1, 0) and (0, 1) apart.
        state = state + np.uint64(part) + np.uint64(0x9E3779B97F4A7C15)
        state = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        state = (state ^ (state >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        state = state ^ (state >> np.uint64(31))
    return float(state >> np.uint64(11)) / 4503599627370496.0 - 1.0


@kernel
def smooth_noise(seed: int, node: int, resource: int, now_s: float) -> float:
    """Noise in [-1, 1], continuous in time; the mean over time is 0."""
    tick = int(np.floor(now_s / NOISE_PERIOD_S))
    part = now_s / NOISE_PERIOD_S - tick
    before = hash_unit(seed, node, resource, tick)
    return before + part * (hash_unit(seed, node, resource, tick + 1) - before)


@kernel
def utilisation(
    now_s: float,
    node: Ints,
    job_type: Ints,
    started_s: Floats,
    cpu: Floats,
    gpus: Floats,
    memory_peak: Floats,
    capacity: Floats,
    cpu_use: Floats,
    disk: Floats,
    network: Floats,
    noise: float,
    seed: int,
) -> Floats:
    """f8[N, 4], fractions in [0, 1] of CPU, memory, disk and network of every node.

    Running jobs, one entry each: node i8[R], job_type i8[R] (-1: no GPU work), started_s f8[R] s,
    cpu f8[R] cores asked for, gpus f8[R] GPUs held (parts count), memory_peak f8[R] GiB.
    Nodes: capacity f8[N, 3] cores, GiB, GPUs. Job types, see hardware.Needs: cpu_use, disk,
    network f8[J]. noise: amplitude relative to the load, 0 for none.
    """
    used = np.zeros((len(capacity), 4))
    for job in range(len(node)):
        n, kind = node[job], job_type[job]
        busy = cpu_use[kind] if kind >= 0 else 0.5
        warm = min(1.0, 0.5 + 0.5 * max(0.0, now_s - started_s[job]) / WARM_UP_S)
        used[n, CPU] += cpu[job] * busy / capacity[n, 0]
        used[n, MEMORY] += memory_peak[job] * warm / capacity[n, 1]
        if kind >= 0:
            used[n, DISK] += gpus[job] * disk[kind] / DISK_MBPS
            used[n, NETWORK] += gpus[job] * network[kind] / NETWORK_MBPS
    for n in range(len(capacity)):
        for resource in range(4):
            level = IDLE[resource] + used[n, resource]
            level *= 1.0 + noise * smooth_noise(seed, n, resource, now_s)
            used[n, resource] = min(1.0, max(0.0, level))
    return used
