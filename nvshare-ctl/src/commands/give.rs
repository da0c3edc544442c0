//! `nvshare-ctl set-limit`, `set-weight`, `set-priority`, `pause` and `resume`: the share and the limits of a client's tenant.

use clap::Args;
use nvshare_admin::Scheduler;
use nvshare_proto::units::{parse_enforcement, parse_priority, parse_weight};
use nvshare_proto::{AdminRequest, Enforcement, GpuUuid, Priority, TenantSettings};

use crate::arguments::{Target, parse_client, parse_compute_limit, parse_memory_limit, parse_target};
use crate::gpu::Gpu;
use crate::output::{Done, print_line};

#[derive(Debug, Args)]
pub(crate) struct LimitOptions {
    /// The client's number, as `clients` shows it, or job:123, one of Slurm's; its tenant's other processes share the limits
    #[arg(value_parser = parse_target, allow_negative_numbers = true)]
    client: Target,

    /// Compute limit, in per cent of each GPU's time, or none
    #[arg(long, value_name = "PERCENT", value_parser = parse_compute_limit, allow_hyphen_values = true)]
    compute: Option<u8>,

    /// Memory limit on each GPU (4g, 512MiB), or none; what is allocated beyond it stays
    #[arg(long, value_name = "SIZE", value_parser = parse_memory_limit, allow_hyphen_values = true)]
    memory: Option<u64>,

    /// How the compute limit is enforced: default (while others want the GPU), force (always) or disable
    #[arg(long, value_name = "POLICY", value_parser = parse_enforcement, allow_negative_numbers = true)]
    policy: Option<Enforcement>,

    /// On this GPU only, by its number, its UUID, or the beginning of that
    #[arg(long, value_name = "GPU")]
    gpu: Option<Gpu>,
}

#[derive(Debug, Args)]
pub(crate) struct WeightOptions {
    /// The client's number, as `clients` shows it, or job:123, one of Slurm's; the weight is its tenant's
    #[arg(value_parser = parse_target, allow_negative_numbers = true)]
    client: Target,

    /// Weight against others: 1 to 10000, where 100 is usual
    #[arg(value_parser = parse_weight, allow_hyphen_values = true)]
    weight: u32,
}

#[derive(Debug, Args)]
pub(crate) struct PriorityOptions {
    /// The client's number, as `clients` shows it, or job:123, one of Slurm's; the priority is its tenant's
    #[arg(value_parser = parse_target, allow_negative_numbers = true)]
    client: Target,

    /// low, normal or high: each step multiplies the weight by 8
    #[arg(value_parser = parse_priority, allow_negative_numbers = true)]
    priority: Priority,
}

#[derive(Debug, Args)]
pub(crate) struct ClientOptions {
    /// The client's number, as `clients` shows it; its tenant's other processes stop and go on with it
    #[arg(value_parser = parse_client, allow_negative_numbers = true)]
    client: u64,
}

pub(crate) fn limit(scheduler: &Scheduler, options: &LimitOptions) -> Done {
    let gpu = options.gpu.as_ref().map(|gpu| gpu.uuid(scheduler)).transpose()?;
    let LimitOptions { compute, memory, policy: enforcement, .. } = *options;
    let given = TenantSettings { compute, memory, enforcement, ..TenantSettings::default() };
    give(scheduler, options.client, gpu, given)
}

fn give(scheduler: &Scheduler, target: Target, gpu: Option<GpuUuid>, given: TenantSettings) -> Done {
    let request = match (target, gpu) {
        (Target::Client(client), gpu) => AdminRequest::SetTerms { client, gpu, given },
        (Target::Job(job), None) => AdminRequest::SetJobBounds { job, given },
        (Target::Job(_), Some(_)) => {
            return Err("the limits of a job are the same on all of its GPUs: leave --gpu out"
                .to_owned()
                .into());
        }
    };
    print_line(&scheduler.change(request)?)
}

pub(crate) fn weight(scheduler: &Scheduler, options: &WeightOptions) -> Done {
    give(
        scheduler,
        options.client,
        None,
        TenantSettings { weight: Some(options.weight), ..TenantSettings::default() },
    )
}

pub(crate) fn priority(scheduler: &Scheduler, options: &PriorityOptions) -> Done {
    give(
        scheduler,
        options.client,
        None,
        TenantSettings { priority: Some(options.priority), ..TenantSettings::default() },
    )
}

pub(crate) fn pause(scheduler: &Scheduler, options: &ClientOptions, paused: bool) -> Done {
    give(
        scheduler,
        Target::Client(options.client),
        None,
        TenantSettings { paused: Some(paused), ..TenantSettings::default() },
    )
}
