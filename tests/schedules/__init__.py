"""Worlds in which the real decisions run under schedules that hypothesis draws.

    actors.py         programs that run only while they are given the turn
    memory_redis.py   Redis as a dictionary, behind the real Store
    training.py       masters, agents and workers of local mode
    jobs.py           reconcile passes against a scheduler
"""
