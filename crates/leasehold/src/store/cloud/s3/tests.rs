use std::collections::VecDeque;
use std::sync::Mutex;
use std::time::Duration;

use http::header::AUTHORIZATION;
use leasehold_testkit::http::{Spoil, TinyS3};
use reqsign_aws_v4::{Credential, RequestSigner, StaticCredentialProvider};
use reqsign_core::time::Timestamp;
use reqsign_core::{Context, ProvideCredential, ProvideCredentialChain, Signer};

use super::keys::{Kept, X_AMZ_DATE, X_AMZ_TOKEN};
use super::*;
use crate::env::Env;
use crate::store::cloud::Cloud;
use crate::store::{Backend as _, Durability, Kind, List};
use crate::{ErrorKind, StoreSettings};

fn options(endpoint: Option<&str>) -> CloudOptions {
    CloudOptions {
        endpoint: endpoint.map(str::to_owned),
        region: Some("eu-north-1".to_owned()),
        access_key: Some("access".to_owned()),
        secret_key: Some("secret".to_owned()),
        ..CloudOptions::default()
    }
}

fn credential(token: Option<&str>) -> Credential {
    Credential {
        access_key_id: "access".to_owned(),
        secret_access_key: "secret".to_owned(),
        session_token: token.map(str::to_owned),
        expires_in: None,
    }
}

/// Ours and that of the library which signs all other requests, made within the same second.
async fn both(
    method: Method,
    key: &str,
    condition: Option<(HeaderName, &str)>,
    token: Option<&str>,
) -> (HeaderMap, HeaderMap) {
    let mut path = "/bucket/".to_owned();
    push_encoded(&mut path, key);
    loop {
        let mut headers = Headers::default();
        let mut theirs = Request::builder().method(&method);
        theirs = theirs.uri(format!("https://s3.example.com{path}"));
        if method == Method::PUT {
            headers.add(CONTENT_LENGTH, 17.into());
            theirs = theirs.header(CONTENT_LENGTH, 17);
        }
        headers.add(HOST, HeaderValue::from_static("s3.example.com"));
        if let Some((name, value)) = &condition {
            headers.add(name.clone(), value.parse().unwrap());
            theirs = theirs.header(name, *value);
        }
        let signing = Signing::new(credential(token), "eu-north-1", None).unwrap();
        signing.sign(&method, &path, &mut headers).unwrap();
        let (mut theirs, ()) = theirs.body(()).unwrap().into_parts();
        let mut given = StaticCredentialProvider::new("access", "secret");
        if let Some(token) = token {
            given = given.with_session_token(token);
        }
        let signer = RequestSigner::new("s3", "eu-north-1");
        let signer = Signer::new(Context::new(), given, signer);
        signer.sign(&mut theirs, None).await.unwrap();
        if theirs.headers[X_AMZ_DATE] == headers.map[X_AMZ_DATE] {
            return (headers.map, theirs.headers);
        }
    }
}

#[tokio::test]
async fn signatures_are_those_of_the_library() {
    for key in ["plain/task.json", "a b", "50%", "x+y?z#", "é/ü", "(a)*'!~-_.$&,:;=@"] {
        for (method, condition) in [
            (Method::GET, None),
            (Method::GET, Some((IF_NONE_MATCH, "\"v1\""))),
            (Method::HEAD, None),
            (Method::PUT, None),
            (Method::PUT, Some((IF_NONE_MATCH, "*"))),
            (Method::PUT, Some((IF_MATCH, "\"v1\""))),
            (Method::DELETE, Some((IF_MATCH, "\"v1\""))),
        ] {
            for token in [None, Some("token/of+a==session")] {
                let (ours, theirs) = both(method.clone(), key, condition.clone(), token).await;
                assert_eq!(ours[AUTHORIZATION], theirs[AUTHORIZATION], "{method} {key:?}");
                assert_eq!(ours.get(X_AMZ_TOKEN), theirs.get(X_AMZ_TOKEN));
                let names = ours[AUTHORIZATION].to_str().unwrap();
                let (name, _) = condition.clone().unwrap_or((HOST, ""));
                assert!(names.contains(name.as_str()), "the condition is signed: {names}");
            }
        }
    }
}

#[test]
fn the_key_of_a_day_is_made_once_for_a_credential() {
    fn make(credential: Credential, before: Option<&Signing>) -> Signing {
        Signing::new(credential, "eu-north-1", before).unwrap()
    }
    let mut first = make(credential(None), None);
    // One that could not be made anew.
    first.key = b"kept".to_vec();
    assert_eq!(make(credential(None), Some(&first)).key, b"kept");
    let other = Credential { secret_access_key: "other".to_owned(), ..credential(None) };
    assert_ne!(make(other, Some(&first)).key, b"kept");
    first.scope = "20000101/eu-north-1/s3/aws4_request".to_owned();
    assert_ne!(make(credential(None), Some(&first)).key, b"kept");
}

#[test]
fn buckets_are_where_opendal_looks_for_them() {
    let url = |bucket: &str, options: &CloudOptions| bucket_url(bucket, options, "eu-north-1");
    assert_eq!(url("b", &options(None)), "https://b.s3.eu-north-1.amazonaws.com");
    // No certificate is for such a host.
    assert_eq!(url("b.c", &options(None)), "https://s3.eu-north-1.amazonaws.com/b.c");
    let own = options(Some("http://127.0.0.1:9000/"));
    assert_eq!(url("b", &own), "http://127.0.0.1:9000/b");
    let hosted = CloudOptions { path_style: Some(false), ..options(Some("minio.example.com")) };
    assert_eq!(url("b", &hosted), "https://b.minio.example.com");
    let named = CloudOptions { path_style: Some(false), ..options(Some("https://b.example.com")) };
    assert_eq!(url("b", &named), "https://b.example.com");
    // However it is written.
    for amazon in
        ["https://s3.amazonaws.com:443", "s3.amazonaws.com:443/", "https://S3.AmazonAWS.com//"]
    {
        let amazon = CloudOptions { path_style: Some(false), ..options(Some(amazon)) };
        assert_eq!(url("b", &amazon), "https://b.s3.eu-north-1.amazonaws.com");
    }
    let usual = options(Some("http://Minio.example.com:80/Below/"));
    assert_eq!(url("b", &usual), "http://minio.example.com/Below/b");
    assert_eq!(url("b", &options(Some("http://[::1]:443"))), "http://[::1]:443/b");
    assert_eq!(url("b", &options(Some("https://127.0.0.1:80"))), "https://127.0.0.1:80/b");
    assert_eq!(url("b", &options(Some("http://host:80?a=b"))), "http://host:80?a=b/b");
}

#[test]
fn a_server_is_the_same_however_it_is_written() {
    let target = |url: &str| Target::of(&url.parse().unwrap()).unwrap();
    for (one, other) in [
        ("http://host:80/b", "http://HOST/b?list"),
        ("https://Host.example.com:443", "https://host.example.com"),
        ("http://[::1]:80", "http://[::1]"),
    ] {
        assert_eq!(target(one), target(other));
    }
    assert_eq!(target("https://Host:443").to_string(), "host");
    assert_eq!(target("http://Host:443").to_string(), "host:443");
    for other in ["http://host:443", "https://host", "http://host:8080", "http://guest"] {
        assert_ne!(target("http://host"), target(other));
    }
}

/// One of this name that is good for so many seconds.
fn temporary(name: &str, seconds: u64) -> Credential {
    let expires_in = Some(Timestamp::now() + Duration::from_secs(seconds));
    Credential { access_key_id: name.to_owned(), expires_in, ..credential(Some("token")) }
}

/// What those who give out credentials do, one after the other; then they have none.
#[derive(Debug, Clone, Default)]
struct Given(Arc<Mutex<VecDeque<Provided>>>);

#[derive(Debug)]
enum Provided {
    One(Credential),
    Failure,
    /// They do not answer.
    Silence,
    /// They ask this server, and have none whatever it says.
    Asked(String),
}

impl ProvideCredential for Given {
    type Credential = Credential;

    async fn provide_credential(&self, at: &Context) -> reqsign_core::Result<Option<Credential>> {
        let next = self.0.lock().unwrap().pop_front();
        // Others get to run meanwhile.
        tokio::task::yield_now().await;
        match next {
            Some(Provided::One(credential)) => Ok(Some(credential)),
            Some(Provided::Failure) => Err(reqsign_core::Error::unexpected("by the test")),
            Some(Provided::Silence) => std::future::pending().await,
            Some(Provided::Asked(url)) => {
                let request = Request::get(url).body(Bytes::new()).unwrap();
                at.http_send(request).await.map(|_| None)
            }
            None => Ok(None),
        }
    }
}

impl Given {
    fn push(&self, provided: Provided) {
        self.0.lock().unwrap().push_back(provided);
    }

    fn left(&self) -> usize {
        self.0.lock().unwrap().len()
    }
}

fn transport() -> Arc<Transport> {
    Arc::new(Transport::new(&StoreSettings::default(), Arc::default(), Env::system()))
}

/// Keys that get their credentials there.
fn keys_from(given: &Given, transport: &Arc<Transport>) -> Keys {
    let mut keys = Keys::new(transport, &options(None), "eu-north-1".to_owned());
    keys.provider = ProvideCredentialChain::new().push(given.clone());
    keys
}

/// Which one requests are signed with, from the next second on.
async fn next(keys: &Keys) -> Option<String> {
    keys.state.lock().unwrap().newest = None;
    keys.signing().await.ok().map(|signing| signing.credential.access_key_id.clone())
}

/// Keys that have one of this name, good for so many seconds.
fn having(given: &Given, name: &str, seconds: u64) -> Keys {
    let keys = keys_from(given, &transport());
    let kept = Kept { credential: temporary(name, seconds), again: 0 };
    keys.state.lock().unwrap().kept = Some(kept);
    keys
}

#[tokio::test]
async fn a_credential_is_kept_until_there_is_a_new_one() {
    let given = Given::default();
    let new = || given.push(Provided::One(temporary("new", 900)));
    // As long as it lasts nobody asks; then somebody does, in time.
    new();
    assert_eq!(next(&having(&given, "old", 300)).await.as_deref(), Some("old"));
    assert_eq!(given.left(), 1);
    let keys = having(&given, "old", 60);
    assert_eq!(next(&keys).await.as_deref(), Some("new"));
    assert_eq!(given.left(), 0);
    new();
    assert_eq!(next(&keys).await.as_deref(), Some("new"));
    assert_eq!(given.left(), 1);
    // There is none just now: the old one will do, and the next second's request does not ask again.
    given.0.lock().unwrap().clear();
    let keys = having(&given, "old", 60);
    given.push(Provided::Failure);
    new();
    assert_eq!(next(&keys).await.as_deref(), Some("old"));
    assert_eq!(next(&keys).await.as_deref(), Some("old"));
    assert_eq!(given.left(), 1);
    keys.state.lock().unwrap().kept.as_mut().unwrap().again = Timestamp::now().as_second();
    assert_eq!(next(&keys).await.as_deref(), Some("new"));
    // Whoever asks may give up: it is still there.
    let keys = having(&given, "old", 60);
    given.push(Provided::Silence);
    assert!(tokio::time::timeout(Duration::from_millis(10), next(&keys)).await.is_err());
    given.push(Provided::Failure);
    assert_eq!(next(&keys).await.as_deref(), Some("old"));
    // It has expired, or as good as: nothing is sent.
    for seconds in [0, 3] {
        let keys = having(&given, "old", seconds);
        given.push(Provided::Failure);
        assert_eq!(next(&keys).await, None);
        new();
        assert_eq!(next(&keys).await.as_deref(), Some("new"));
    }
}

/// An answer may come while a request of the next second is signed, or while a new credential is
/// fetched: what was refused is not used again.
#[tokio::test]
async fn what_is_refused_while_another_is_fetched_is_forgotten_too() {
    let given = Given::default();
    let keys = having(&given, "old", 60);
    given.push(Provided::Failure);
    let refused = temporary("old", 60);
    let refusing = async {
        assert_eq!(given.left(), 0, "it is being fetched");
        keys.forget(&refused);
    };
    let (fetched, ()) = tokio::join!(next(&keys), refusing);
    assert_eq!(fetched, None);
    assert!(keys.state.lock().unwrap().kept.is_none());
}

/// A bucket whose requests are signed with what is given there.
fn cloud(server: &TinyS3, given: &Given) -> Cloud {
    let options = options(Some(&server.endpoint()));
    let settings = StoreSettings::default();
    let mut cloud =
        Cloud::new(Kind::S3, "bucket", "", &options, &settings, &Env::system()).unwrap();
    let keys = Arc::new(keys_from(given, &cloud.transport));
    let objects = Objects::new(&cloud.transport, "bucket", "", &options, Some(keys.clone()));
    (cloud.keys, cloud.objects) = (Some(keys), objects.map(Arc::new));
    cloud
}

fn is_of(request: &leasehold_testkit::http::Request, name: &str) -> bool {
    request.headers["authorization"].contains(&format!("Credential={name}/"))
}

/// A server that knows only requests of this name, and says so in this way.
fn knows(name: &'static str, status: u16, code: &'static str) -> TinyS3 {
    const LISTING: &str = "<ListBucketResult><IsTruncated>false</IsTruncated></ListBucketResult>";
    TinyS3::start(move |request| match is_of(request, name) {
        false => Spoil::Instead(status, code),
        true if request.target.contains("list-type") => Spoil::Body(LISTING),
        true => Spoil::Nothing,
    })
}

/// Credentials without a date, in a file for example, are exchanged at any time. Nothing of a request
/// that is refused for that was carried out: it is signed anew and sent again, whatever it is.
#[tokio::test]
async fn credentials_that_the_store_refuses_are_fetched_anew() {
    let key = Key::new("the/key").unwrap();
    for (status, code) in [(400, "ExpiredToken"), (403, "InvalidAccessKeyId")] {
        let server = knows("new", status, code);
        for request in ["GET", "PUT", "DELETE", "HEAD", "LIST", "OPEN"] {
            // This server's clock is far off, which explains a bare 403.
            if (status, request) == (403, "HEAD") {
                continue;
            }
            let given = Given::default();
            let cloud = cloud(&server, &given);
            let before = server.requests().len();
            for name in ["old", "new"] {
                let credential = Credential { access_key_id: name.to_owned(), ..credential(None) };
                given.push(Provided::One(credential));
            }
            let done = match request {
                "GET" => cloud.get(&key, None).await.map(drop),
                "PUT" => {
                    let (body, volatile) = (Bytes::from("x"), Durability::Volatile);
                    let put = cloud.put(&key, body, &When::Absent, volatile).await;
                    assert!(matches!(put, Ok(Put::Stored(_))), "{put:?}");
                    Ok(())
                }
                "DELETE" => cloud.delete(&key, None).await.map(drop),
                "HEAD" => cloud.head(&key).await.map(drop),
                "OPEN" => cloud.open(&key).await.map(drop),
                _ => cloud.list(List::prefix("").unwrap()).next_page().await.map(drop),
            };
            done.unwrap();
            let requests = server.requests().split_off(before);
            let names: Vec<bool> = requests.iter().map(|request| is_of(request, "new")).collect();
            assert_eq!(names, [false, true], "{request}");
            assert_eq!((given.left(), cloud.meter().usage().retries), (0, 1), "{request}");
            // Those of OpenDAL and ours are signed with the same one.
            cloud.get(&key, None).await.map(drop).unwrap();
            cloud.list(List::prefix("").unwrap()).next_page().await.map(drop).unwrap();
        }
    }
}

/// If there are no others it is said at once, and not of the object.
#[tokio::test]
async fn credentials_that_were_not_exchanged_are_not_tried_again() {
    let key = Key::new("the/key").unwrap();
    let server = knows("new", 400, "ExpiredToken");
    let given = Given::default();
    let cloud = cloud(&server, &given);
    for _ in 0..4 {
        given.push(Provided::One(credential(None)));
    }
    let get = cloud.get(&key, None).await.map(drop).unwrap_err();
    let head = cloud.head(&key).await.map(drop).unwrap_err();
    let list = cloud.list(List::prefix("").unwrap()).next_page().await.map(drop).unwrap_err();
    for error in [get, head, list] {
        assert_eq!(error.kind(), ErrorKind::Denied, "{error}");
    }
    assert_eq!(server.requests().len(), 3);
    // What they allow is another matter.
    let server = TinyS3::start(|_| Spoil::Instead(403, "AccessDenied"));
    let cloud = self::cloud(&server, &given);
    for _ in 0..2 {
        given.push(Provided::One(credential(None)));
    }
    for _ in 0..2 {
        let error = cloud.get(&key, None).await.map(drop).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Denied);
    }
    // Nor are there any: then nothing is sent, by whichever way.
    given.0.lock().unwrap().clear();
    let cloud = self::cloud(&server, &given);
    let before = server.requests().len();
    let get = cloud.get(&key, None).await.map(drop).unwrap_err();
    let list = cloud.list(List::prefix("").unwrap()).next_page().await.map(drop).unwrap_err();
    for error in [get, list] {
        assert_eq!(error.kind(), ErrorKind::Denied);
        assert!(error.to_string().contains("are there credentials?"), "{error}");
    }
    assert_eq!(server.requests().len(), before);
}

/// Those who give out credentials may be busy. That is not the same as to have none.
#[tokio::test]
async fn credentials_that_cannot_be_had_just_now_are_waited_for() {
    for (status, code, kind) in [
        (400, "Throttling", ErrorKind::Unavailable),
        (503, "", ErrorKind::Unavailable),
        (403, "AccessDenied", ErrorKind::Denied),
    ] {
        let server = TinyS3::start(move |_| Spoil::Instead(status, code));
        let given = Given::default();
        let keys = keys_from(&given, &transport());
        given.push(Provided::Asked(server.endpoint()));
        let error = keys.signing().await.map(drop).unwrap_err();
        assert_eq!(error.kind(), kind, "{error}");
        assert_eq!(server.requests().len(), 1);
    }
}

/// An answer to an earlier request says nothing of those that came since.
#[test]
fn only_what_was_refused_is_forgotten() {
    let keys = having(&Given::default(), "later", 900);
    keys.forget(&temporary("earlier", 900));
    assert!(keys.state.lock().unwrap().kept.is_some());
    keys.forget(&temporary("later", 900));
    assert!(keys.state.lock().unwrap().kept.is_none());
}

/// A write was carried out if the store says so, whatever else it does not say.
#[tokio::test]
async fn a_write_whose_version_is_not_told_is_not_a_failure() {
    let server = TinyS3::start(|_| Spoil::Body(""));
    let (given, key) = (Given::default(), Key::new("the/key").unwrap());
    let mut cloud = cloud(&server, &given);
    given.push(Provided::One(credential(None)));
    for _ in 0..2 {
        let put = cloud.put(&key, "x".into(), &When::Absent, Durability::Durable).await;
        assert!(matches!(put, Ok(Put::Unknown(_))), "{put:?}");
        // By OpenDAL next.
        cloud.objects = None;
    }
    let methods: Vec<String> = server.requests().into_iter().map(|seen| seen.method).collect();
    assert_eq!(methods, ["PUT", "PUT"]);
}
