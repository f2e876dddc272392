use leasehold_testkit::http::{Spoil, TinyS3};
use reqsign_aws_v4::RequestSigner;
use reqsign_core::Signer;

use super::*;

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
        let Ok(signing) = Signing::new(credential(token), "eu-north-1", None) else {
            panic!("no key was made");
        };
        assert!(signing.sign(&method, &path, &mut headers).is_ok());
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
        match Signing::new(credential, "eu-north-1", before) {
            Ok(signing) => signing,
            Err(_) => panic!("no key was made"),
        }
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

fn kept(name: &str, seconds: u64) -> Option<Kept> {
    Some(Kept { credential: temporary(name, seconds), again: 0 })
}

/// Which one requests are signed with.
async fn renewed(
    kept: &mut Option<Kept>,
    provided: impl Future<Output = Result<Credential, Failed>>,
) -> Option<String> {
    Keys::renewed(kept, provided).await.ok().map(|credential| credential.access_key_id)
}

async fn none() -> Result<Credential, Failed> {
    Err(Failed::Unsent(Error::unavailable("by the test")))
}

#[tokio::test]
async fn a_credential_is_kept_until_there_is_a_new_one() {
    let new = async || Ok(temporary("new", 900));
    let unasked = async || panic!("asked for another one");
    // As long as it lasts nobody asks; then somebody does, in time.
    let mut one = kept("old", 300);
    assert_eq!(renewed(&mut one, unasked()).await.as_deref(), Some("old"));
    let mut one = kept("old", 60);
    assert_eq!(renewed(&mut one, new()).await.as_deref(), Some("new"));
    assert_eq!(renewed(&mut one, unasked()).await.as_deref(), Some("new"));
    // There is none just now: the old one will do, and the next second's request does not ask again.
    let mut one = kept("old", 60);
    assert_eq!(renewed(&mut one, none()).await.as_deref(), Some("old"));
    assert_eq!(renewed(&mut one, unasked()).await.as_deref(), Some("old"));
    one.as_mut().unwrap().again = Timestamp::now().as_second();
    assert_eq!(renewed(&mut one, new()).await.as_deref(), Some("new"));
    // Whoever asks may give up: it is still there.
    let mut one = kept("old", 60);
    let asking =
        tokio::time::timeout(Duration::from_millis(10), renewed(&mut one, std::future::pending()));
    assert!(asking.await.is_err());
    assert_eq!(renewed(&mut one, none()).await.as_deref(), Some("old"));
    // It has expired, or as good as: nothing is sent.
    for seconds in [0, 3] {
        let mut one = kept("old", seconds);
        assert_eq!(renewed(&mut one, none()).await, None);
        assert_eq!(renewed(&mut one, new()).await.as_deref(), Some("new"));
    }
}

/// What the store refuses is fetched anew, whatever it says of itself: it may have been revoked, or the
/// clock may be wrong.
#[tokio::test]
async fn credentials_that_the_store_refuses_are_forgotten() {
    let server = TinyS3::start({
        let mut answers = [
            Spoil::Nothing,
            Spoil::Instead(403, "AccessDenied"),
            Spoil::Instead(400, "ExpiredToken"),
        ]
        .into_iter();
        move |_| answers.next().unwrap_or(Spoil::Nothing)
    });
    let (meter, env) = (Arc::default(), crate::env::Env::system());
    let transport = Arc::new(Transport::new(&crate::StoreSettings::default(), meter, env));
    let options = options(Some(&server.endpoint()));
    let objects = Objects::new(&transport, "bucket", "", &options).unwrap();
    let key = Key::new("the/key").unwrap();
    let keys = objects.keys.as_ref().unwrap();
    let has_any = || {
        let newest = keys.newest.lock().unwrap().is_some();
        (keys.fetching.try_lock().unwrap().is_some(), newest)
    };
    assert_eq!(has_any(), (false, false));
    objects.get(&key, None).await.map(drop).unwrap();
    assert_eq!(has_any(), (true, true));
    // That is about what they allow.
    objects.get(&key, None).await.map(drop).unwrap_err();
    assert_eq!(has_any(), (true, true));
    let error = objects.get(&key, None).await.map(drop).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Denied);
    assert_eq!(has_any(), (false, false));
    objects.get(&key, None).await.map(drop).unwrap();
    assert_eq!(has_any(), (true, true));
    // An answer to an earlier request says nothing of those that came since.
    keys.forget(&temporary("earlier", 900));
    assert_eq!(has_any(), (true, true));
}
