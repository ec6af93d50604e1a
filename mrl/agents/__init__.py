"""Agents: multi-turn responses, with a user's environment between the turns. Workers import this first: it imports
nothing.
"""
