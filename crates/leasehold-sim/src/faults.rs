//! What goes wrong, and how often.

use crate::rng::Rng;

/// How often each thing goes wrong: per request, or per node and chaos phase.
#[derive(Debug, Clone, Default)]
pub struct Faults {
    /// The request gets lost: not carried out, not answered.
    pub lost_request: f64,
    /// The answer gets lost, or is a 500 after the commit: carried out, not answered.
    pub lost_answer: f64,
    /// Carried out twice, the second time up to minutes later.
    pub duplicate: f64,
    /// Not answered, and carried out minutes later.
    pub ghost: f64,
    /// The store says that others are writing (409).
    pub conflict: f64,
    /// A single failure of the store (503), nothing carried out.
    pub unavailable: f64,
    /// It takes seconds.
    pub slow: f64,
    /// It takes longer than the client waits.
    pub stuck: f64,
    /// The store is overloaded for a while: how many times in a phase.
    pub storms: f64,
    /// A node's process dies while it makes a request.
    pub deaths: f64,
    /// A node stops, for longer than any ttl, while it makes a request.
    pub stalls: f64,
    /// A node's process dies, and is started again: how many times per node.
    pub crashes: f64,
    /// A node stops for longer than any ttl: how many times per node.
    pub pauses: f64,
    /// A node's wall clock jumps: how many times per node.
    pub jumps: f64,
    /// Wall clocks are up to a day off, and all clocks of nodes drift.
    pub skew: f64,
    /// Pages of listings are short, and others write in between.
    pub short_pages: f64,
    /// Listings are not in order.
    pub unsorted: f64,
    /// The store ignores the condition of a DELETE, and is known for that.
    pub no_conditional_delete: f64,
    /// Somebody leaves a damaged or empty record where a lease should be.
    pub damage: f64,
    /// A machine with a replica does not reach the store for a long while: how many times per machine.
    pub offline: f64,
}

/// Every fault by its name.
pub const NAMES: [&str; 20] = [
    "deaths",
    "stalls",
    "lost-request",
    "lost-answer",
    "duplicate",
    "ghost",
    "conflict",
    "unavailable",
    "slow",
    "stuck",
    "storms",
    "crashes",
    "pauses",
    "jumps",
    "skew",
    "short-pages",
    "unsorted",
    "no-conditional-delete",
    "damage",
    "offline",
];

impl Faults {
    /// The rate of the fault with this name.
    pub fn rate(&mut self, name: &str) -> Option<&mut f64> {
        Some(match name {
            "deaths" => &mut self.deaths,
            "stalls" => &mut self.stalls,
            "lost-request" => &mut self.lost_request,
            "lost-answer" => &mut self.lost_answer,
            "duplicate" => &mut self.duplicate,
            "ghost" => &mut self.ghost,
            "conflict" => &mut self.conflict,
            "unavailable" => &mut self.unavailable,
            "slow" => &mut self.slow,
            "stuck" => &mut self.stuck,
            "storms" => &mut self.storms,
            "crashes" => &mut self.crashes,
            "pauses" => &mut self.pauses,
            "jumps" => &mut self.jumps,
            "skew" => &mut self.skew,
            "short-pages" => &mut self.short_pages,
            "unsorted" => &mut self.unsorted,
            "no-conditional-delete" => &mut self.no_conditional_delete,
            "damage" => &mut self.damage,
            "offline" => &mut self.offline,
            _ => return None,
        })
    }

    /// Rates for one seed: one in eight is calm, most have a few sorts of trouble, some have all.
    pub fn draw(rng: &mut Rng) -> Self {
        let mut some = |probability: f64| f64::from(u8::from(rng.chance(probability)));
        // Which way of listing and deleting a store has is no trouble of a moment.
        let mut faults = Self {
            short_pages: some(0.5),
            unsorted: some(0.15),
            no_conditional_delete: some(0.08),
            skew: some(0.7),
            ..Self::default()
        };
        let mood = rng.below(8);
        if mood == 0 {
            return faults;
        }
        // A sort of trouble is there with this probability, at up to this rate.
        let (there, worst) = match mood {
            1..=4 => (0.35, 0.15),
            5..=6 => (0.7, 0.25),
            _ => (1.0, 0.4),
        };
        let requests = [
            "lost-request",
            "lost-answer",
            "duplicate",
            "ghost",
            "conflict",
            "unavailable",
            "slow",
            "stuck",
        ];
        for name in requests {
            if rng.chance(there) {
                let rate = worst * (rng.below(1000) as f64 / 1000.0).powi(2);
                faults.rate(name).into_iter().for_each(|fault| *fault = rate);
            }
        }
        for name in ["deaths", "stalls"] {
            if rng.chance(there) {
                let rate = rng.below(60) as f64 / 1000.0;
                faults.rate(name).into_iter().for_each(|fault| *fault = rate);
            }
        }
        for (name, most) in
            [("storms", 2), ("crashes", 3), ("pauses", 3), ("jumps", 2), ("damage", 2)]
        {
            if rng.chance(there) {
                let rate = rng.between(1, most) as f64;
                faults.rate(name).into_iter().for_each(|fault| *fault = rate);
            }
        }
        // By dice of its own, so that the seeds of scenarios without it stay what they are.
        let mut dice = rng.clone().fork(1);
        if dice.chance(there) {
            faults.offline = dice.between(1, 3) as f64;
        }
        faults
    }

    /// Whether every request is answered in time, and nobody stops.
    pub fn answers_all(&self) -> bool {
        let Self { lost_request, lost_answer, ghost, unavailable, slow, stuck, .. } = self;
        let Self { storms, stalls, pauses, damage, conflict, .. } = self;
        let requests = [lost_request, lost_answer, ghost, unavailable, slow, stuck, conflict];
        let others = [storms, stalls, pauses, damage];
        requests.iter().chain(&others).all(|rate| **rate == 0.0)
    }

    /// As `name=rate` for each that is not zero.
    pub fn text(&self) -> String {
        let mut copy = self.clone();
        let mut text = String::new();
        for name in NAMES {
            let rate = copy.rate(name).map_or(0.0, |rate| *rate);
            if rate > 0.0 {
                if !text.is_empty() {
                    text.push(' ');
                }
                text.push_str(&format!("{name}={rate:.3}"));
            }
        }
        if text.is_empty() { "calm".to_owned() } else { text }
    }
}

/// A store that breaks its word, and nobody was told: what `doctor` must refuse.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Broken {
    /// `PUT If-None-Match` overwrites: everybody wins a race of creates.
    EverybodyCreates,
    /// `PUT If-Match` looks first and writes then: acknowledged updates get lost.
    LosesUpdates,
    /// `DELETE If-Match` deletes whatever is there.
    IgnoresDeleteMatch,
    /// `DELETE If-Match` looks first and deletes then: a PUT and a DELETE both win.
    PutAndDeleteWin,
    /// A listing loses the keys at which its pages end.
    ListLosesKeys,
    /// Versions do not tell contents of equal length apart.
    WeakVersions,
    /// Reads show what was there a moment ago.
    StaleReads,
}

impl Broken {
    /// All of them.
    pub const ALL: [Self; 7] = [
        Self::EverybodyCreates,
        Self::LosesUpdates,
        Self::IgnoresDeleteMatch,
        Self::PutAndDeleteWin,
        Self::ListLosesKeys,
        Self::WeakVersions,
        Self::StaleReads,
    ];

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Self::EverybodyCreates => "everybody-creates",
            Self::LosesUpdates => "loses-updates",
            Self::IgnoresDeleteMatch => "ignores-delete-match",
            Self::PutAndDeleteWin => "put-and-delete-win",
            Self::ListLosesKeys => "list-loses-keys",
            Self::WeakVersions => "weak-versions",
            Self::StaleReads => "stale-reads",
        }
    }
}
