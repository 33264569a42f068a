"""What a team's stores need once: MLflow's database in PostgreSQL, the bucket, MLflow's rules for users.

`python -m infra.prepare_team` reads M3DIFF_MLFLOW_STORE and M3DIFF_MLFLOW_ARTIFACTS, and for S3 what boto3 reads; what
is there already stays.
"""

import os
from urllib.parse import urlsplit

from infra.services import prepare, services


def create_database(url: str) -> None:
    import psycopg2

    place = urlsplit(url)
    name = place.path.lstrip("/")
    connection = psycopg2.connect(place._replace(path="/postgres").geturl())
    connection.autocommit = True
    with connection.cursor() as cursor:
        cursor.execute("SELECT 1 FROM pg_database WHERE datname = %s", (name,))
        if cursor.fetchone() is None:
            cursor.execute(f'CREATE DATABASE "{name}"')
            print(f"database {name}: made")
    connection.close()


def create_bucket(url: str) -> None:
    import boto3

    bucket = urlsplit(url).netloc
    client = boto3.client("s3", endpoint_url=os.environ.get("MLFLOW_S3_ENDPOINT_URL"))
    if bucket not in [known["Name"] for known in client.list_buckets()["Buckets"]]:
        client.create_bucket(Bucket=bucket)
        print(f"bucket {bucket}: made")


def main() -> None:
    store, artifacts = os.environ.get("M3DIFF_MLFLOW_STORE", ""), os.environ.get("M3DIFF_MLFLOW_ARTIFACTS", "")
    if store.startswith("postgresql://"):
        create_database(store)
    if artifacts.startswith("s3://"):
        create_bucket(artifacts)
    prepare(services()[1])


if __name__ == "__main__":
    main()
