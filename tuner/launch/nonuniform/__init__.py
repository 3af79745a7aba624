"""Nonuniform tensor parallelism (NTP): replicas of different tensor-parallel degree train one model together (arXiv 2504.06095).

layout (which rank holds which units), trial (what is asked) and driver's command line import no torch; the rest runs in a trial's own
processes: groups, reshard, training, failover, and the driver that starts them.
"""
