//! `nvshare-ctl sleep` and `nvshare-ctl wake`: a client's process leaves the GPU, and comes back.

use clap::Args;
use nvshare_admin::Scheduler;
use nvshare_proto::AdminRequest;

use crate::arguments::parse_client;
use crate::output::{Done, print_line};

#[derive(Debug, Args)]
pub(crate) struct Options {
    /// The client's number, as `clients` shows it
    #[arg(value_parser = parse_client, allow_negative_numbers = true)]
    client: u64,
}

pub(crate) fn sleep(scheduler: &Scheduler, options: &Options) -> Done {
    print_line(&scheduler.change(AdminRequest::Sleep { client: options.client })?)
}

pub(crate) fn wake(scheduler: &Scheduler, options: &Options) -> Done {
    print_line(&scheduler.change(AdminRequest::Wake { client: options.client })?)
}
