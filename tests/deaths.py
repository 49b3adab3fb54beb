"""What happens when something dies: the rows of a table in docs/architecture.md, each with the tests that show it."""

from __future__ import annotations

from dataclasses import dataclass

HEADER = ("what", "what happens")


@dataclass(frozen=True)
class Death:
    """A row. what, happens: Markdown. tests: node ids without parameters, one at least of the default suite."""

    what: str
    happens: str
    tests: tuple[str, ...]


DEATHS = (
    Death(
        "an encoder, or one of the processes that share it",
        "All its processes are restarted, up to `limits.max_encoder_restarts` times. Parts that only it held are "
        "produced again, first in line, with the same bits.",
        (
            "tests/controller/test_state.py::test_a_replica_dies_with_any_of_its_processes_and_its_deaths_count_together",
            "tests/controller/test_state.py::test_restarts_are_counted_for_each_producer",
            "tests/flow/test_parts.py::test_a_lost_owners_parts_are_first_in_line_and_its_messages_refused",
            "tests/e2e/test_dead_producers.py::test_a_run_outlives_its_producers",
            "tests/e2e/test_encoder_replicas.py::test_split_encoders_train_as_whole_ones_and_outlive_an_encoder_rank",
        ),
    ),
    Death(
        "an encoder, once too often",
        "The other encoders do its work if their segments hold a worst-case step; else the run ends with the numbers.",
        (
            "tests/controller/test_state.py::test_the_run_goes_on_without_an_encoder_while_others_are_left",
            "tests/controller/test_state.py::"
            "test_a_run_whose_memory_does_not_suffice_without_an_encoder_ends_with_the_numbers",
            "tests/e2e/test_dead_producers.py::test_a_run_goes_on_without_an_encoder_that_may_not_start_again",
        ),
    ),
    Death(
        "a feeder",
        "It is restarted up to the same number of times; it continues after the last unit of which it reported its "
        "share, and puts again what only it held.",
        (
            "tests/actors/test_feeder.py::test_a_successor_goes_on_where_the_last_report_ended",
            "tests/actors/test_feeder.py::test_lost_parts_are_produced_again_as_they_were",
            "tests/flow/test_feeding.py::test_each_successor_continues_where_its_own_predecessor_was",
            "tests/e2e/test_dead_producers.py::test_a_run_outlives_its_producers",
        ),
    ),
    Death(
        "an encoder or feeder that does not answer for `limits.silence_timeout_s`, or hangs for "
        "`limits.collective_timeout_s`",
        "It is killed and restarted as if it had died; a line says what it did.",
        (
            "tests/controller/test_producer_watch.py::test_one_that_works_too_long_at_one_thing_is_named_with_it",
            "tests/controller/test_producer_watch.py::test_a_stopped_one_is_found_by_its_silence_and_asked_once",
            "tests/controller/test_watch.py::test_a_producer_that_hangs_is_named_with_what_it_did",
            "tests/e2e/test_dead_producers.py::test_producers_that_hang_are_named_and_cost_no_sample",
        ),
    ),
    Death(
        "a backbone rank, also one that does not answer for `limits.silence_timeout_s`, or hangs for "
        "`limits.collective_timeout_s`",
        "All ranks end and start again from the last snapshot or checkpoint, up to `limits.max_backbone_restarts` "
        "times, since its share of the gradients is lost. Encoders and feeders stay; they free what they hold of the "
        "lost steps and make it again, with the same bits. If they have ended already, all actors start again.",
        (
            "tests/controller/test_history.py::test_it_goes_back_to_a_snapshot_that_is_newer_than_the_checkpoint",
            "tests/e2e/test_modes.py::test_a_lost_rank_costs_no_step_that_a_snapshot_has",
            "tests/controller/test_state.py::test_a_rank_that_is_lost_takes_the_whole_backbone_back_once",
            "tests/controller/test_state.py::test_a_rank_that_is_lost_after_producers_have_ended_takes_all_back",
            "tests/actors/test_coordinator.py::test_the_run_goes_back_under_everybodys_hands",
            "tests/e2e/test_modes.py::test_a_run_that_lost_a_rank_starts_the_backbone_again_to_the_bit",
            "tests/e2e/test_modes.py::test_a_rank_that_hangs_is_named_and_costs_no_step",
        ),
    ),
    Death(
        "a node that ranks need, and no other comes for `limits.elastic_after_s`",
        "The run starts anew from its last checkpoint with the data-parallel sizes that the other nodes have room for. "
        "When all have room again, it writes a checkpoint and goes on with them.",
        (
            "tests/controller/test_elastic.py::test_the_backbones_replicas_come_first",
            "tests/controller/test_elastic.py::test_patience_counts_from_the_loss_or_the_last_step",
            "tests/e2e/test_lost_node.py::test_a_run_goes_on_with_fewer_replicas_and_with_all_of_them_again",
        ),
    ),
    Death(
        "a node, while the run starts for the first time",
        "All actors start again once a node has room, up to `limits.max_coordinator_restarts` times.",
        (
            "tests/controller/test_group_run.py::test_a_first_start_that_loses_a_node_is_tried_again",
            "tests/controller/test_lost_nodes.py::test_a_loss_is_waited_for_as_long_as_ray_takes_to_notice",
            "tests/controller/test_cluster.py::test_a_node_that_dies_while_it_is_asked_does_not_count",
        ),
    ),
    Death(
        "a rank or the coordinator, while the run starts for the first time; also ranks that have not started within "
        "`limits.start_timeout_s`",
        "All actors start again, once, if `limits.max_coordinator_restarts` and `limits.max_backbone_restarts` allow "
        "any: a second start that fails ends the run, since the next one would most likely fail too. So does an error "
        "of a process, other than a wait that passed its limit, at any start.",
        (
            "tests/controller/test_state.py::test_a_first_start_that_loses_a_process_is_tried_again_once",
            "tests/controller/test_group_run.py::test_a_first_start_that_hangs_is_tried_again_and_no_later_one",
            "tests/e2e/test_lost_by_signal.py::test_a_run_that_lost_its_first_start_ends_as_the_undisturbed_one",
        ),
    ),
    Death(
        "a keeper of snapshots, also one that does not answer",
        "Training goes on, and another keeper takes its place; until it has a snapshot of all its ranks, the run would "
        "go back to the last checkpoint.",
        (
            "tests/controller/test_keepers.py::test_a_keeper_that_died_or_hangs_is_replaced",
            "tests/actors/test_keeper.py::test_a_keeper_that_hangs_is_waited_for_once",
            "tests/actors/test_keeper.py::test_ranks_find_the_keeper_that_took_a_lost_ones_place",
        ),
    ),
    Death(
        "a backbone rank, once too often",
        "The run ends (exit code 1) and names the rank. `--resume` continues.",
        (
            "tests/controller/test_state.py::test_a_backbone_is_started_again_so_often_and_no_more",
            "tests/controller/test_watch.py::test_the_watch_goes_on_after_a_restart_until_the_limit",
            "tests/e2e/test_modes.py::test_a_run_that_lost_a_rank_goes_on_to_the_bit",
        ),
    ),
    Death(
        "the coordinator, also one that does not answer for `limits.coordinator_timeout_s`",
        "The addresses of all parts are lost: all actors end and start again from the last snapshot or checkpoint, up "
        "to `limits.max_coordinator_restarts` times. Then the run ends; `--resume` continues.",
        (
            "tests/controller/test_history.py::test_it_goes_back_to_a_snapshot_that_is_newer_than_the_checkpoint",
            "tests/controller/test_state.py::test_all_start_again_without_a_coordinator_once_they_ran",
            "tests/controller/test_state.py::test_a_group_that_may_not_be_lost_ends_with_its_coordinator",
            "tests/controller/test_watch.py::test_the_loss_of_the_coordinator_ends_the_group_once_the_backbone_ran",
            "tests/controller/test_watch.py::test_a_coordinator_that_does_not_answer_is_lost",
            "tests/e2e/test_lost_by_signal.py::test_a_run_that_lost_its_coordinator_ends_as_the_undisturbed_one",
        ),
    ),
    Death(
        "the driver, or its whole process group",
        "All actors end with it, and their memory is freed. `--resume` continues.",
        (
            "tests/e2e/test_killed_driver.py::test_nothing_is_left_of_a_run_whose_driver_is_killed",
            "tests/e2e/test_resume.py::test_killed_and_stopped_runs_end_as_the_undisturbed_one",
        ),
    ),
    Death(
        "Ray's own process of this node, the raylet: it is stopped or hangs after the last step",
        "The run is complete. After 20 s a warning names the raylet, a stopped one is continued, and else the "
        "connection to it is cut, so that the driver ends.",
        (
            "tests/controller/test_local_ray.py::test_an_end_that_waits_for_a_silent_raylet_is_cut_with_a_warning",
            "tests/controller/test_local_ray.py::test_a_stopped_process_of_the_session_is_continued",
            "tests/e2e/test_lost_by_signal.py::test_a_run_whose_raylet_is_stopped_after_the_last_step_ends",
        ),
    ),
    Death(
        "a machine that is to be given up: SIGTERM with a deadline",
        "The run stops after its step and writes a checkpoint. If it has not ended within "
        "`limits.preemption_grace_s`, it ends at once and names the checkpoint that `--resume` goes on from.",
        (
            "tests/controller/test_watch.py::test_a_run_that_got_sigterm_has_the_grace_and_no_longer",
            "tests/e2e/test_killed_driver.py::test_a_run_that_cannot_end_within_the_grace_says_what_stands",
        ),
    ),
    Death(
        "any of these while a checkpoint is written",
        "The unfinished directory is removed at the next start; the last complete checkpoint counts.",
        (
            "tests/training/test_checkpoint_store.py::test_a_kill_before_the_commit_leaves_the_last_complete_one",
            "tests/training/test_checkpoint_store.py::test_a_kill_anywhere_in_the_commit_leaves_a_complete_one",
            "tests/e2e/test_resume.py::test_killed_and_stopped_runs_end_as_the_undisturbed_one",
        ),
    ),
    Death(
        "a lease that is not reported within `limits.lease_timeout_s`",
        "Another encoder gets it; the late report is refused.",
        (
            "tests/flow/test_parts.py::test_an_expired_lease_that_was_taken_again_by_the_same_owner_has_a_new_epoch",
            "tests/flow/test_parts.py::test_an_expired_lease_does_not_split_its_batch",
        ),
    ),
    Death(
        "the backbone waits longer than `limits.stall_timeout_s`",
        "The run ends and reports which process waited for what. A warning comes after `limits.stall_warning_s` "
        "without a step, and names those that do not move. Producers that wait for the backbone are healthy: nothing "
        "is logged.",
        (
            "tests/actors/test_link.py::test_a_wait_warns_in_time_and_then_ends",
            "tests/controller/test_stalls.py::test_the_first_step_has_the_time_of_a_start_and_later_ones_the_limit",
            "tests/actors/test_prefetch.py::test_a_wait_that_is_too_long_names_what_it_waits_for",
            "tests/actors/test_encoder.py::test_waiting_for_the_backbone_is_no_warning",
            "tests/actors/test_feeder.py::test_a_full_segment_waits_for_the_backbone",
        ),
    ),
    Death(
        "storage that does not answer",
        "Three more attempts within three seconds, then the run ends. It never becomes a rejected sample.",
        (
            "tests/data/test_storage.py::test_three_more_attempts_come_within_three_seconds",
            "tests/data/test_storage.py::test_only_what_may_pass_is_tried_again",
            "tests/data/test_rejections.py::test_what_is_no_fault_of_the_sample_ends_the_run",
            "tests/data/test_s3.py::test_a_server_that_is_gone_is_no_fault_of_the_data",
        ),
    ),
    Death(
        "a bad sample",
        "Quarantined. The run ends when more than `data.max_rejected_fraction` of the samples seen (64 at least) are.",
        (
            "tests/data/test_rejections.py::test_a_bad_sample_keeps_its_reason_and_the_rows_id",
            "tests/observability/test_quarantine.py::test_a_line_says_where_the_sample_is_from_and_why_it_is_bad",
            "tests/controller/test_state.py::test_too_many_rejected_samples_fail_the_run",
        ),
    ),
    Death(
        "a full pool",
        "The producer waits.",
        (
            "tests/actors/test_feeder.py::test_a_full_segment_waits_for_the_backbone",
            "tests/flow/test_flow.py::test_a_lease_counts_on_the_memory_that_comes_with_it",
        ),
    ),
)


def rendered() -> str:
    """Return the table as the page has it."""
    rows = [HEADER, *((death.what, death.happens) for death in DEATHS)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    return "\n".join([lines[0], "| --- | --- |", *lines[1:]]) + "\n"
