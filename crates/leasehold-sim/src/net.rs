//! The network between the nodes and the store: where requests and answers get lost, arrive late,
//! or twice.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use async_trait::async_trait;
use bytes::Bytes;
use leasehold::store::backend::{Backend, Kind, Lister, Reading};
use leasehold::store::meter::{Class, Meter};
use leasehold::store::{Delete, Durability, Get, List, Meta, Page, Put, Unknown};
use leasehold::{Error, ErrorKind, Key, Result, Version, When};

use crate::check::Applied;
use crate::env::boot_time;
use crate::faults::Broken;
use crate::world::{Answer, Life, Micros, State, Waiting, What, World};

/// How long a client waits for an answer.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// The latest that a late write lands.
pub const LATEST: Micros = 600_000_000;

/// What is asked of the store.
#[derive(Debug, Clone)]
pub enum Ask {
    /// A read.
    Get(Key, Option<Version>),
    /// A look.
    Head(Key),
    /// A write.
    Put(Key, Bytes, When),
    /// A delete.
    Delete(Key, Option<Version>),
    /// Deletes of many.
    DeleteMany(Vec<Key>),
    /// A page of a listing.
    List(Box<List>, Option<String>),
}

/// What a client is told.
#[derive(Debug)]
pub enum Reply {
    /// To a GET.
    Got(Get),
    /// To a HEAD.
    Looked(Option<Meta>),
    /// To a PUT: stored, or refused.
    Stored(Option<Version>),
    /// To a DELETE: whether it applied.
    Deleted(bool),
    /// To many.
    Done,
    /// To a LIST.
    Page(Page, Option<String>),
    /// 409.
    Conflict,
    /// Nothing, or a 500.
    None,
}

/// A request on its way.
#[derive(Debug)]
pub struct Request {
    life: Life,
    label: &'static str,
    ask: Ask,
    /// To be answered, unless nobody waits.
    answer: Option<Arc<Waiting>>,
    /// How long the answer takes.
    back: Micros,
    /// It was looked at, and its condition held: what is left is to carry it out.
    judged: bool,
    /// It comes after its client stopped waiting.
    late: bool,
}

impl State {
    /// Sends a request, deciding its fate.
    fn send(&mut self, life: Life, ask: Ask) -> Arc<Waiting> {
        let waiting = Arc::new(Waiting::default());
        let label = self.nodes[life.node].label;
        let writes = matches!(ask, Ask::Put(..) | Ask::Delete(..) | Ask::DeleteMany(..));
        let many = matches!(ask, Ask::DeleteMany(..));
        let timeout = TIMEOUT.as_micros() as u64;
        let mut there = self.rng.between(500, 15_000);
        let mut back = self.rng.between(500, 15_000);
        let faults = self.faults.clone();
        if self.hits(faults.slow) {
            // As long as a client waits, and longer than some ttls.
            there += self.rng.below(timeout);
            back += self.rng.below(2_000_000);
        }
        // A process dies, or stops, most tellingly between two of its requests.
        if self.hits(faults.deaths) {
            let at = self.now + self.rng.below(40_000);
            self.at(at, What::Crash(life.node));
        }
        if self.hits(faults.stalls) {
            let at = self.now + self.rng.below(40_000);
            let long = self.rng.between(100_000, self.longest_stall);
            self.at(at, What::Pause(life.node, long));
        }
        let at = self.now + there;
        let request = |ask: Ask, answer: Option<Arc<Waiting>>, late: bool| {
            What::Arrive(Box::new(Request { life, label, ask, answer, back, judged: false, late }))
        };
        if self.now < self.nodes[life.node].offline_until {
            let after = self.until_noticed();
            self.answer_in(after, life, &waiting, Reply::None);
            return waiting;
        }
        let storm = self.now < self.storm_until && self.hits(0.8);
        if storm || self.hits(faults.unavailable) {
            self.answer_in(there + back, life, &waiting, Reply::None);
            // 503 says that nothing was done. Mostly.
            if writes && self.rng.chance(0.2) {
                self.at(at, request(ask, None, true));
            }
        } else if self.hits(faults.lost_request) {
            let after = self.until_noticed();
            self.answer_in(after, life, &waiting, Reply::None);
        } else if self.hits(faults.stuck) {
            self.answer_in(timeout, life, &waiting, Reply::None);
            if self.rng.chance(0.5) {
                let later = at + self.rng.below(2 * timeout);
                self.at(later, request(ask, None, true));
            }
        } else if writes && self.hits(faults.lost_answer) {
            let after = there + self.until_noticed();
            self.answer_in(after, life, &waiting, Reply::None);
            self.at(at, request(ask, None, false));
        } else if writes && self.hits(faults.ghost) {
            let after = self.until_noticed();
            self.answer_in(after, life, &waiting, Reply::None);
            let later = at + self.lateness();
            self.at(later, request(ask, None, true));
        } else if writes && !many && self.hits(faults.conflict) {
            self.answer_in(there + back, life, &waiting, Reply::Conflict);
        } else {
            if writes && self.hits(faults.duplicate) {
                let later = at + self.lateness();
                self.at(later, request(ask.clone(), None, true));
            }
            // A client that has waited long enough takes it for lost.
            if there + back > timeout {
                self.answer_in(timeout, life, &waiting, Reply::None);
            }
            self.at(at, request(ask, Some(waiting.clone()), false));
        }
        waiting
    }

    /// Whether something goes wrong now that goes wrong at this rate.
    pub fn hits(&mut self, rate: f64) -> bool {
        self.troubled && self.rng.chance(rate)
    }

    fn answer_in(&mut self, after: Micros, life: Life, waiting: &Arc<Waiting>, reply: Reply) {
        let at = self.now + after;
        self.at(at, What::Answer(life, waiting.clone(), reply));
    }

    /// A connection that breaks is noticed; one that hangs is waited for.
    fn until_noticed(&mut self) -> Micros {
        match self.rng.chance(0.6) {
            true => self.rng.between(1000, 300_000),
            false => TIMEOUT.as_micros() as u64,
        }
    }

    /// How late a late write is: a second, a minute, or ten.
    fn lateness(&mut self) -> Micros {
        let most = *self.rng.pick(&[1_000_000, LATEST / 10, LATEST]);
        1 + self.rng.below(most)
    }

    /// A request reaches the store.
    pub fn arrive(&mut self, request: Request) {
        let now = self.store_time();
        let reply = match &request.ask {
            Ask::Get(key, unless) => {
                let got = self.objects.read(key, unless.as_ref(), now);
                self.trace.mix_bytes(key.as_str().as_bytes());
                Reply::Got(got)
            }
            Ask::Head(key) => Reply::Looked(self.objects.look(key, now)),
            Ask::List(list, after) => {
                let most = self.page;
                let (page, next) = self.objects.list(list, after.as_deref(), most, now);
                Reply::Page(page, next)
            }
            Ask::Put(key, body, when) => {
                let holds = request.judged || self.objects.holds(key, when);
                if !holds {
                    Reply::Stored(None)
                } else if self.races(&request, Broken::LosesUpdates) {
                    return self.look_first(request);
                } else {
                    let (key, body) = (key.clone(), body.clone());
                    Reply::Stored(Some(self.write(&request, &key, Some(body))))
                }
            }
            Ask::Delete(key, version) => {
                let there = self.objects.get(key).map(|there| &there.version);
                let blind = self.objects.deletes_blindly
                    || self.objects.broken == Some(Broken::IgnoresDeleteMatch);
                let holds = match version {
                    Some(version) => request.judged || blind || there == Some(version),
                    None => true,
                };
                if !holds {
                    Reply::Deleted(false)
                } else if version.is_some() && self.races(&request, Broken::PutAndDeleteWin) {
                    return self.look_first(request);
                } else {
                    let key = key.clone();
                    self.write(&request, &key, None);
                    Reply::Deleted(true)
                }
            }
            Ask::DeleteMany(keys) => {
                for key in keys.clone() {
                    self.write(&request, &key, None);
                }
                Reply::Done
            }
        };
        self.witness(&request, &reply);
        if let Some(answer) = request.answer {
            let at = self.now + request.back;
            self.at(at, What::Answer(request.life, answer, reply));
        }
    }

    fn races(&self, request: &Request, broken: Broken) -> bool {
        let conditional = match &request.ask {
            Ask::Put(_, _, when) => matches!(when, When::Matches(_)),
            _ => true,
        };
        self.objects.broken == Some(broken) && conditional && !request.judged
    }

    /// The store looks first and acts then.
    fn look_first(&mut self, request: Request) {
        let most = if matches!(request.ask, Ask::Delete(..)) { 3_000_000 } else { 400_000 };
        let at = self.now + self.rng.between(1000, most);
        self.at(at, What::Arrive(Box::new(Request { judged: true, ..request })));
    }

    /// Carries a write out, and checks that it may be.
    fn write(&mut self, request: &Request, key: &Key, body: Option<Bytes>) -> Version {
        let now = self.store_time();
        let before = match body {
            Some(body) => self.objects.put(key, body, now),
            None => self.objects.delete(key, now),
        };
        let after = self.objects.get(key).cloned();
        let version = after.as_ref().map(|after| after.version.clone());
        self.applied(Applied {
            life: request.life,
            label: request.label,
            key: key.as_str(),
            before,
            after,
            late: request.late,
        });
        version.unwrap_or_else(|| Version::new("gone"))
    }

    /// Notes an exchange in the history.
    fn witness(&mut self, request: &Request, reply: &Reply) {
        let (what, key) = match &request.ask {
            Ask::Get(key, _) => ("GET", key.as_str()),
            Ask::Head(key) => ("HEAD", key.as_str()),
            Ask::Put(key, _, When::Any) => ("PUT", key.as_str()),
            Ask::Put(key, _, When::Absent) => ("PUT absent", key.as_str()),
            Ask::Put(key, _, When::Matches(_)) => ("PUT match", key.as_str()),
            Ask::Delete(key, None) => ("DELETE", key.as_str()),
            Ask::Delete(key, Some(_)) => ("DELETE match", key.as_str()),
            Ask::DeleteMany(keys) => ("DELETE many", keys.first().map_or("", |key| key.as_str())),
            Ask::List(list, _) => ("LIST", list.prefix_text()),
        };
        let outcome = match reply {
            Reply::Got(Get::Found(_)) | Reply::Looked(Some(_)) => "found",
            Reply::Got(Get::Absent) | Reply::Looked(None) => "absent",
            Reply::Got(Get::Unchanged) => "unchanged",
            Reply::Stored(Some(_)) => "stored",
            Reply::Stored(None) | Reply::Deleted(false) => "refused",
            Reply::Deleted(true) | Reply::Done => "deleted",
            Reply::Page(..) => "page",
            Reply::Conflict | Reply::None => "",
        };
        let now = self.now;
        self.trace.mix(now);
        self.trace.mix_bytes(what.as_bytes());
        self.trace.mix_bytes(key.as_bytes());
        self.trace.mix_bytes(outcome.as_bytes());
        if self.trace.records() {
            let mut line = format!("{what} {key} → {outcome}");
            match (&request.ask, reply) {
                (Ask::Put(_, body, _), Reply::Stored(Some(_))) => {
                    line.push_str(&format!("  {}", excerpt(body)));
                }
                (_, Reply::Got(Get::Found(object))) => {
                    line.push_str(&format!("  {}", excerpt(&object.body)));
                }
                (_, Reply::Page(page, next)) => {
                    let more = if next.is_some() { " and more" } else { "" };
                    line.push_str(&format!(" of {}{more}", page.len()));
                }
                _ => {}
            }
            if request.late {
                line.push_str("  (late)");
            } else if request.answer.is_none() {
                line.push_str("  (its answer gets lost)");
            }
            if self.nodes[request.life.node].epoch != request.life.epoch {
                line.push_str("  (of an earlier life)");
            }
            self.note(request.life.node, || line);
        }
    }

    /// Somebody leaves something unreadable.
    pub fn damage(&mut self, key: &str) {
        let Ok(key) = Key::new(key) else { return };
        // Once is enough: nobody could see that it was done twice.
        let there = self.objects.get(&key);
        let damaged = there.is_some_and(|there| !there.body.ends_with(b"}\n"));
        if !self.troubled || damaged {
            return;
        }
        let body = match self.rng.chance(0.5) && self.emptied.insert(key.to_string()) {
            true => Bytes::new(),
            // Never the same twice: equal bytes have equal versions, and nobody could tell.
            false => format!("{{\"holderId\": \"{:x}", self.rng.bits()).into(),
        };
        let now = self.store_time();
        let before = self.objects.put(&key, body, now);
        let after = self.objects.get(&key).cloned();
        let life = self.life(0);
        self.trace.note(self.now, "somebody", || format!("damages {key}"));
        self.applied(Applied {
            life,
            label: "damage",
            key: key.as_str(),
            before,
            after,
            late: false,
        });
    }
}

/// As much of a body as fits into a line.
pub fn excerpt(body: &[u8]) -> String {
    let text = String::from_utf8_lossy(body);
    let text: String = text
        .chars()
        .map(|c| match c {
            '\u{1f}' => '|',
            '\n' => '⏎',
            c if c.is_whitespace() => ' ',
            c => c,
        })
        .collect();
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match text.char_indices().nth(220) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text,
    }
}

/// A node's connection to the store.
#[derive(Debug)]
pub struct Client {
    world: World,
    life: Life,
    meter: Arc<Meter>,
    /// What the store's clock said last.
    heard: Arc<Mutex<Option<Reading>>>,
}

impl Client {
    /// Of this life of a node.
    pub fn new(world: &World, life: Life) -> Self {
        Self { world: world.clone(), life, meter: Arc::default(), heard: Arc::default() }
    }

    async fn ask(&self, class: Class, ask: Ask) -> Reply {
        self.meter.request(class, 0);
        let waiting = {
            let mut state = self.world.state();
            match state.lives(self.life) {
                true => Some(state.send(self.life, ask)),
                false => None,
            }
        };
        match waiting {
            Some(waiting) => {
                let reply = Answer(waiting).await;
                if !matches!(reply, Reply::None) {
                    let state = self.world.state();
                    let store = state.store_time().floor_to_second();
                    let at = boot_time(&state, self.life.node);
                    *self.heard.lock().unwrap_or_else(PoisonError::into_inner) =
                        Some(Reading { store, at, unsure: Duration::from_secs(1) });
                }
                reply
            }
            // The process is dead. Its tasks do not know that, but nothing comes of them.
            None => std::future::pending().await,
        }
    }
}

fn no_answer() -> Error {
    Error::new(ErrorKind::Unavailable, "no answer")
}

#[async_trait]
impl Backend for Client {
    fn url(&self) -> String {
        "sim:".to_owned()
    }

    fn kind(&self) -> Kind {
        Kind::S3
    }

    fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    fn reading(&self) -> Option<Reading> {
        *self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    async fn get(&self, key: &Key, unless: Option<&Version>) -> Result<Get> {
        match self.ask(Class::Get, Ask::Get(key.clone(), unless.cloned())).await {
            Reply::Got(got) => {
                if let Get::Found(object) = &got {
                    let mut state = self.world.state();
                    let now = state.now;
                    if let Some(queue) = &mut state.check.queue {
                        queue.witnessed(now, self.life, key.as_str(), &object.body);
                    }
                }
                Ok(got)
            }
            _ => Err(no_answer()),
        }
    }

    async fn head(&self, key: &Key) -> Result<Option<Meta>> {
        match self.ask(Class::Head, Ask::Head(key.clone())).await {
            Reply::Looked(meta) => Ok(meta),
            _ => Err(no_answer()),
        }
    }

    async fn put(&self, key: &Key, body: Bytes, when: &When, _: Durability) -> Result<Put> {
        Ok(match self.ask(Class::Put, Ask::Put(key.clone(), body, when.clone())).await {
            Reply::Stored(Some(version)) => Put::Stored(version),
            Reply::Stored(None) => Put::Refused,
            Reply::Conflict => Put::Contended,
            _ => Put::Unknown(Unknown::NoAnswer(no_answer())),
        })
    }

    async fn delete(&self, key: &Key, version: Option<&Version>) -> Result<Delete> {
        Ok(match self.ask(Class::Delete, Ask::Delete(key.clone(), version.cloned())).await {
            Reply::Deleted(true) => Delete::Deleted,
            Reply::Deleted(false) => Delete::Refused,
            Reply::Conflict => Delete::Contended,
            _ => Delete::Unknown(Unknown::NoAnswer(no_answer())),
        })
    }

    async fn delete_many(&self, keys: &[Key]) -> Result<()> {
        if keys.is_empty() {
            return Ok(());
        }
        match self.ask(Class::Delete, Ask::DeleteMany(keys.to_vec())).await {
            Reply::Done => Ok(()),
            _ => Err(no_answer()),
        }
    }

    fn list(&self, list: List) -> Box<dyn Lister> {
        let (world, meter, heard) = (self.world.clone(), self.meter.clone(), self.heard.clone());
        let client = Self { world, life: self.life, meter, heard };
        Box::new(Pages { client, list, after: None, done: false })
    }

    async fn persist(&self, _: &[Key]) -> Result<()> {
        Ok(())
    }
}

struct Pages {
    client: Client,
    list: List,
    after: Option<String>,
    done: bool,
}

#[async_trait]
impl Lister for Pages {
    async fn next_page(&mut self) -> Result<Option<Page>> {
        if self.done {
            return Ok(None);
        }
        let ask = Ask::List(Box::new(self.list.clone()), self.after.clone());
        match self.client.ask(Class::List, ask).await {
            Reply::Page(page, next) => {
                self.done = next.is_none();
                self.after = next;
                Ok(Some(page))
            }
            _ => Err(no_answer()),
        }
    }
}
