"""The problems by the name of the function that a reader writes."""

from mgpu_tutorial.challenges import (
    batches,
    messages,
    models,
    solutions,
    together,
    whole_steps,
)
from mgpu_tutorial.challenges.score import Challenges

build = Challenges(
    "challenges",
    {
        # after part I
        solutions.all_to_all_on_a_ring: messages.AllToAllOnARing(),
        solutions.all_reduce_over_nodes: messages.AllReduceOverNodes(),
        solutions.broadcast_in_chunks: messages.BroadcastInChunks(),
        # after part II
        solutions.buckets: batches.Buckets(),
        solutions.TokenStream: batches.TokenStreams(),
        # after part III
        solutions.gathers: models.Gathers(),
        solutions.shared_heads: models.SharedHeads(),
        solutions.rows_of_a_ring: models.RowsOfARing(),
        solutions.placed_experts: together.PlacedExperts(),
        # after part IV
        solutions.planned_step: together.PlannedSteps(),
        solutions.cheapest_tests: together.CheapestTests(),
        # after part III, with a bound that nobody reaches
        solutions.orders_in_slots: models.OrdersInSlots(),
        # after parts III and IV, by price
        solutions.ShardedTrainer: whole_steps.WholeSteps(),
    },
)
