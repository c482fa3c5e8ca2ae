"""The commands: one short function per command, in the order in which a user needs them."""

from collections.abc import Callable

from hvdtrain.commands import cluster, datasets, machine, plans, training

COMMANDS: dict[str, Callable[..., int]] = {
    "doctor": machine.doctor,
    "data fetch": datasets.data_fetch,
    "data pack": datasets.data_pack,
    "data synth": datasets.data_synth,
    "data verify": datasets.data_verify,
    "data info": datasets.data_info,
    "train": training.train,
    "export": training.export,
    "jobs submit": cluster.jobs_submit,
    "jobs sweep": cluster.jobs_sweep,
    "jobs status": cluster.jobs_status,
    "jobs logs": cluster.jobs_logs,
    "jobs cancel": cluster.jobs_cancel,
    "report": cluster.report,
    "reproduce paper-a": cluster.reproduce_paper_a,
    "plan show": plans.plan_show,
    "plan simulate": plans.plan_simulate,
    "plan check": plans.plan_check,
    "bench step": machine.bench_step,
    "bench loader": machine.bench_loader,
    "bench allreduce": machine.bench_allreduce,
    "bench exchange": machine.bench_exchange,
}
